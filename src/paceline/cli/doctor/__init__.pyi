from .command import check_at_join as check_at_join, doctor as doctor, findings_of as findings_of
