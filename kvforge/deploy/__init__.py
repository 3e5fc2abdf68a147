"""`kvforge deploy`: puts the service in place under systemd, and says what is wrong with one that is in place.

Its law: what is to be done is said before it is done, and only what is missing is done; nothing that somebody edited is
overwritten. It knows of coordinator and worker no more than their command lines and configuration files. A check
changes nothing.

From outside: `install.install`, with the `Wishes` it takes, and `check.check`. `files` is the folder deploy/ of the
repository, by a link: the units and example configurations, which are a part of the package.
"""
