"""The kinds of proof, one in a file, each with a `policy.Verifier` and a `policy.Prover`.

kinds.py        all of them: number, name, reader of the table, verifier
secret.py       the shared secret
certificate.py  X.509, also SPIFFE; authorities.py, certificate_path.py, certificate_signature.py, identity.py
crl.py          revoked certificates of workers; freshness.py: how current a list must be
tdx.py          Intel TDX; tdx_quote.py, tdx_collateral.py
snp.py          AMD SEV-SNP; snp_report.py, snp_chain.py, snp_revocation.py
nvidia.py       NVIDIA GPUs; spdm.py, nvidia_chain.py, ocsp_status.py, reference_values.py
azure.py        confidential VMs on Azure; hcl_report.py, tpm_quote.py
token.py        a verifier's token; jose.py, token_claims.py
attestation.py  what proofs without a key of the worker share
bundle.py       several proofs for one rule
der.py          DER, read strictly
"""
