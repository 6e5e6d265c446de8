"""Facts in, plan out, without torch: what is in memory when, proved safe, and bounded from below."""
