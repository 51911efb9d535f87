from .fleet import distribute as distribute
