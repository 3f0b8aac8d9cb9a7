"""Make a package, which pip can install, of the modules of this repository."""
