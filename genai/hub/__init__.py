"""Models by name: what a reference means, what a hub lists, which files are needed, and the folder they are kept in."""
