"""Configuration: profiles (TOML) as frozen settings, and the state of a running installation.

``load_profile`` reads ``profiles/NAME.toml`` (or a path); an unknown key is an error that names the
nearest valid one. ``Runtime`` adds what a running installation has: the addresses of its servers
and the secrets generated for it; ``Login`` is how a machine without them reaches one elsewhere.
Reads PACELINE_PROFILES, PACELINE_STATE, XDG_CONFIG_HOME and credentials from the environment.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
