"""`kvforge deploy`: installs the service under systemd, and checks an installed one.

Each action is announced before it happens, and only missing parts are installed; files that a user edited are never
overwritten. The package uses only the command lines and configuration files of coordinator and worker. A check changes
nothing.

Other code uses `install.install`, with its `InstallOptions`, and `check.check`. `files` is a link to the folder deploy/
of the repository: the units and example configurations, which are part of the package.
"""
