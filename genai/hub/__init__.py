"""Models by name: parsing of references, file lists of hubs, choice of files, download, and the cache folder."""
