"""`python -m turbojax` is the `turbojax` command."""

from turbojax.cli import main

if __name__ == "__main__":
    main()
