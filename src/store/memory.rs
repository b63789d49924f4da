//! The embedded store.
/// TODO(helper)
#[derive(Debug, Default)]
pub struct MemoryStore;
