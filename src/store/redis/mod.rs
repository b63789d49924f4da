//! Leases in Redis.
