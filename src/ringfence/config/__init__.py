"""What a worker is told: settings, files, addresses.

settings.py       RINGFENCE_* variables, the policy and credentials that they name
private_files.py  files with secrets and policies: owner, mode, written whole or not at all
interfaces.py     addresses, as settings write them and of this machine, and how fast its links are
cores.py          the cores of this machine, and the channels that follow from them
"""
