"""What many runs say together: tables, statistics, figures."""
