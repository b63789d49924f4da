//! The names of a key's companions.
//!
//! What belongs to one key has to lie in that key's hash slot, and no two keys may share a companion, or a release of
//! one would hand ownership of it to a waiter for the other. Redis hashes what stands between the first `{` and the
//! next `}`, if anything does; else the whole key. So a companion of `a` is `{a}:fence` and one of `{a}:b` is
//! `{a}:b::fence`. Where neither works the key is refused.
use crate::{Key, error::Invalid};

const SUFFIXES: [&str; 4] = ["fence", "queue", "waiters", "mark"];

/// Refuses keys whose companions could not be kept apart from other keys'.
pub(super) fn check(key: &Key) -> Result<(), Invalid> {
    let name = key.as_str();
    if name.contains('}') && !has_hash_tag(name) {
        return Err(Invalid::new("key", "on Redis, no `}` outside of a hash tag such as in `{user:1}:mail`"));
    }
    let suffix = name.rsplit_once(':').map(|(_, suffix)| suffix);
    if suffix.is_some_and(|s| SUFFIXES.contains(&s)) {
        return Err(Invalid::new("key", "on Redis, not ending in `:fence`, `:queue`, `:waiters` or `:mark`"));
    }
    Ok(())
}

/// A key's companions, by their names.
pub(super) struct Companions<'a> {
    key: &'a str,
}

impl<'a> Companions<'a> {
    pub(super) fn of(key: &'a Key) -> Self {
        Companions { key: key.as_str() }
    }
    /// The largest fence that was given for a lease.
    pub(super) fn fence(&self) -> String {
        self.named(SUFFIXES[0])
    }
    /// Who stands in line for a lease.
    pub(super) fn queue(&self) -> String {
        self.named(SUFFIXES[1])
    }
    /// Until when they count as alive.
    pub(super) fn waiters(&self) -> String {
        self.named(SUFFIXES[2])
    }
    /// The largest fence that wrote a fenced value.
    pub(super) fn mark(&self) -> String {
        self.named(SUFFIXES[3])
    }

    fn named(&self, suffix: &str) -> String {
        let key = self.key;
        if has_hash_tag(key) { format!("{key}::{suffix}") } else { format!("{{{key}}}:{suffix}") }
    }
}

fn has_hash_tag(name: &str) -> bool {
    name.split_once('{').and_then(|(_, rest)| rest.find('}')).is_some_and(|length| length > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};

    /// What Redis hashes, as its cluster specification says it.
    fn hashed(name: &str) -> &str {
        let Some(open) = name.find('{') else { return name };
        match name[open + 1..].find('}') {
            None | Some(0) => name,
            Some(length) => &name[open + 1..open + 1 + length],
        }
    }

    fn strings(letters: &str, longest: usize) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..longest {
            last = last.iter().flat_map(|s| letters.chars().map(move |c| format!("{s}{c}"))).collect();
            all.extend_from_slice(&last);
        }
        all.remove(0);
        all
    }

    fn companions(key: &Key) -> [String; 4] {
        let c = Companions::of(key);
        [c.fence(), c.queue(), c.waiters(), c.mark()]
    }

    #[test]
    fn companions_share_the_slot_of_their_key_and_no_two_keys_share_a_companion() {
        let keys: Vec<Key> = strings("ab:{}", 6).into_iter().map(Key::from).collect();
        assert_eq!(keys.len(), 19_530);
        let keys: Vec<Key> = keys.into_iter().filter(|k| check(k).is_ok()).collect();
        assert!(keys.len() > 8_000, "{} are left", keys.len());

        let names: HashSet<&str> = keys.iter().map(Key::as_str).collect();
        let mut owners: HashMap<String, &Key> = HashMap::new();
        for key in &keys {
            for companion in companions(key) {
                assert_eq!(hashed(&companion), hashed(key.as_str()), "{companion} is not in the slot of {key}");
                assert!(!names.contains(companion.as_str()), "{companion} is a key");
                assert!(check(&Key::from(&companion)).is_err(), "{companion} could be a key");
                let other = owners.insert(companion.clone(), key);
                assert!(other.is_none(), "{key} and {other:?} share {companion}");
            }
        }
    }

    #[test]
    fn keys_that_cannot_be_told_apart_are_refused_and_the_others_are_not() {
        for good in ["a", "lock:order:1001", "{order}", "x{order}:1", "a{", "{a{b}", "fence", "a:fences", "ключ:1"]
        {
            assert!(check(&Key::from(good)).is_ok(), "{good}");
        }
        for bad in ["a}", "{}", "a{}b", "}{", "{}{a}", "a:fence", "{a}:queue", "{a}::waiters", ":mark"] {
            assert_eq!(check(&Key::from(bad)).map_err(|e| e.setting), Err("key"), "{bad}");
        }
    }
}
