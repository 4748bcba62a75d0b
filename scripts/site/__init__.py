"""The documentation site: what MkDocs is told about files outside of docs/, and checks of what it built."""
