"""SAF and MESA where people already train; each module needs its framework, this package none."""
