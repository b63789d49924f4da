//! The secret of one acquisition.
use crate::error::{Invalid, StoreError};
use std::{fmt, sync::Arc};
use uuid::Uuid;

/// Who asks for leases: the part of an [`Owner`] that all acquisitions of one [`Leases`](crate::Leases) share.
///
/// The label is for people who read the store; the inbox is where the store can leave word for this process. Neither
/// proves anything.
#[derive(Clone, Debug)]
pub struct Identity {
    label: Arc<str>,
    inbox: Arc<str>,
}

impl Identity {
    /// The longest label, in bytes.
    pub const MAX_LABEL: usize = 128;

    /// An identity with a fresh inbox.
    ///
    /// # Errors
    /// [`Invalid`] when the label is empty, longer than [`Identity::MAX_LABEL`] bytes, or has a `#`, a space or a
    /// control character in it.
    pub fn new(label: impl Into<Arc<str>>) -> Result<Self, Invalid> {
        let label: Arc<str> = label.into();
        if label.is_empty() || label.len() > Self::MAX_LABEL {
            return Err(Invalid::new("label", "1 to 128 bytes"));
        }
        if label.chars().any(|c| c == '#' || c.is_whitespace() || c.is_control()) {
            return Err(Invalid::new("label", "no `#`, no space and no control character"));
        }
        // No secret, but two processes must not share one: a forked child would inherit a generator's next numbers.
        let inbox = getrandom::u64().unwrap_or_else(|_| fastrand::u64(..) ^ u64::from(std::process::id()));
        Ok(Identity { label, inbox: format!("{inbox:016x}").into() })
    }

    /// `host:pid`, or as much of it as the platform tells.
    pub(crate) fn default_label() -> String {
        let host: String = host_name()
            .chars()
            .map(|c| if c == '#' || c.is_whitespace() || c.is_control() { '-' } else { c })
            .take(64)
            .collect();
        let host = if host.len() > 100 || host.is_empty() { "localhost".to_owned() } else { host };
        format!("{host}:{}", std::process::id())
    }

    /// Who we say we are.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// The name of this process's inbox: 16 hexadecimal digits.
    pub fn inbox(&self) -> &Arc<str> {
        &self.inbox
    }
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// The secret of one acquisition: `<label>/<inbox>/<uuid v4>`.
///
/// Made before the first byte is sent and never used again once a release for it was sent. Whoever can present it owns
/// the lease, so `Debug` shows only its beginning.
#[derive(Clone)]
pub struct Owner {
    identity: Identity,
    id: Uuid,
}

impl Owner {
    /// Draws a new owner.
    ///
    /// The randomness comes from the kernel each time, not from a generator in this process: a forked child would
    /// inherit such a generator, and with it its parent's next secrets.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the kernel gives no randomness.
    pub fn draw(identity: &Identity) -> Result<Self, StoreError> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|e| StoreError::unavailable("the kernel gave no randomness for an owner").with_source(e))?;
        let id = uuid::Builder::from_random_bytes(bytes).into_uuid();
        Ok(Owner { identity: identity.clone(), id })
    }

    /// Another owner of the same identity.
    ///
    /// # Errors
    /// As [`draw`](Owner::draw).
    pub(crate) fn draw_another(&self) -> Result<Self, StoreError> {
        Owner::draw(&self.identity)
    }

    /// The whole secret, for the store to write and compare. Keep it out of logs.
    pub fn secret(&self) -> String {
        format!("{}/{}/{}", self.identity.label, self.identity.inbox, self.id.hyphenated())
    }

    /// The label part.
    pub fn label(&self) -> &Arc<str> {
        &self.identity.label
    }

    /// The inbox part.
    pub fn inbox(&self) -> &Arc<str> {
        &self.identity.inbox
    }

    /// The unique part.
    pub fn id(&self) -> &Uuid {
        &self.id
    }
}

impl PartialEq for Owner {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}
impl Eq for Owner {}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = self.id.simple().to_string();
        write!(f, "Owner({}/{}…)", self.identity.label, &id[..4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_acquisition_draws_another_secret() {
        let identity = Identity::new("me").unwrap();
        let mut seen: Vec<_> = (0..1000).map(|_| Owner::draw(&identity).unwrap().secret()).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
    }

    #[test]
    fn debug_does_not_tell_the_secret() {
        let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
        let shown = format!("{owner:?}");
        assert!(shown.len() < 20 && !shown.contains(&owner.secret()[20..]), "{shown}");
    }

    #[test]
    fn labels_that_would_blur_the_value_in_the_store_are_refused() {
        for bad in ["", "a#1", "a b", "a\n", &"x".repeat(129)] {
            assert_eq!(Identity::new(bad).map(|_| ()).map_err(|e| e.setting), Err("label"), "{bad:?}");
        }
        assert!(Identity::new(Identity::default_label()).is_ok());
    }
}
