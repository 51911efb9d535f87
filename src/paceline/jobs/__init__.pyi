from .cost import (
    By as By,
    cost_of as cost_of,
    cost_row as cost_row,
    day_of as day_of,
    estimate as estimate,
    grouped as grouped,
    held_text as held_text,
    money as money,
    price_of as price_of,
)
