from .command import doctor as doctor, findings_of as findings_of
