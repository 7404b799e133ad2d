"""How one operator of a member becomes operators that compute it for all members, by families, in one table."""
