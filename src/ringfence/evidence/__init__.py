"""Collectors of evidence on this machine: from its TEE, from its GPUs, from a verifier service.

guest.py, tsm.py                     the report of this guest, from the kernel
azure_guest.py, tpm.py, metadata.py  on Azure: from the vTPM and the metadata service
nvml.py                              of its GPUs
token_command.py, workload_api.py    a token from the user's command, a certificate from SPIFFE
device_lock.py                       one request to a device at a time
collateral.py, ocsp_fetch.py         signed statements of Intel and NVIDIA, fetched for a policy
evidence_file.py, measure.py         evidence in a file, and the policy tables that admit it
"""
