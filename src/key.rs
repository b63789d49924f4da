//! The name of what is protected.
use crate::error::Invalid;
use std::{borrow::Cow, fmt, sync::Arc};

/// The name of what a lease protects; in Redis, the key itself.
///
/// Made from any string, and checked when it is used: a lease cannot be asked for under an empty key or one longer
/// than [`Key::MAX_LEN`] bytes. A store may refuse more (the Redis store refuses keys whose braces would let two keys
/// share a hash tag). Cloning is cheap.
///
/// ```
/// use leasehold::Key;
/// let key = Key::from("report:monthly");
/// assert_eq!(key.as_ref(), "report:monthly");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Arc<str>);

impl Key {
    /// The longest key, in bytes.
    pub const MAX_LEN: usize = 1024;

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What every store requires of a key.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        match self.0.len() {
            0 => Err(Invalid::new("key", "not empty")),
            n if n > Self::MAX_LEN => Err(Invalid::new("key", "at most 1024 bytes")),
            _ => Ok(()),
        }
    }
}

impl From<&str> for Key {
    fn from(s: &str) -> Self {
        Key(s.into())
    }
}
impl From<String> for Key {
    fn from(s: String) -> Self {
        Key(s.into())
    }
}
impl From<&String> for Key {
    fn from(s: &String) -> Self {
        Key(s.as_str().into())
    }
}
impl From<Arc<str>> for Key {
    fn from(s: Arc<str>) -> Self {
        Key(s)
    }
}
impl From<Cow<'_, str>> for Key {
    fn from(s: Cow<'_, str>) -> Self {
        Key(s.into())
    }
}
impl From<&Key> for Key {
    fn from(k: &Key) -> Self {
        k.clone()
    }
}
impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_and_an_over_long_key_are_refused_by_name() {
        assert_eq!(Key::from("").check(), Err(Invalid::new("key", "not empty")));
        assert!(Key::from("x".repeat(1024)).check().is_ok());
        assert_eq!(Key::from("x".repeat(1025)).check().map_err(|e| e.setting), Err("key"));
    }
}
