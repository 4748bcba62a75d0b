"""Evidence recorded on real hardware; each folder's SOURCES.md says where every file comes from."""
