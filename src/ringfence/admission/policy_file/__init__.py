"""The policy file: TOML, read strictly. What its tables mean is said where each kind of proof is verified.

policy_file.py    the policy: its rules and top-level keys
toml_table.py     a strict reader of tables: an unknown key is an error
"""
