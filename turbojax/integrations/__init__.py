"""turbojax behind other tools' interfaces; each module needs its own extra."""
