"""Facts in, plan out, without torch: which bytes are in memory when, a proof of safety, and a lower bound."""
