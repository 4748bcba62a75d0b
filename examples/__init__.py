"""Examples. A package, so that tests import these and not a package of the same name that a dependency has installed."""
