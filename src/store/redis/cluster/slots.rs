//! Which server keeps which keys.
use fred::types::{Value, config::Server};

/// How many slots a cluster's keys are divided into.
const SLOTS: usize = 16384;

/// In place of a server, for a slot that nobody serves.
const NOBODY: u16 = u16::MAX;

/// A map of the cluster, as some node has drawn it.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Slots {
    /// For each slot the place of its primary in the list; empty before anything is known.
    owners: Vec<u16>,
    primaries: Vec<Server>,
    replicas: Vec<Server>,
    /// Servers that say `ASK` only when they have none of an operation's keys, and `TRYAGAIN` when they have some:
    /// Redis 7 and later.
    pub(super) exact: bool,
}

impl Slots {
    /// Reads the answer to `CLUSTER SLOTS`. A node that does not know its own address leaves it out: it is where it was
    /// asked.
    pub(super) fn read(answer: Value, asked: &Server) -> Option<Slots> {
        let mut slots = Slots { owners: vec![NOBODY; SLOTS], ..Slots::default() };
        for range in list(answer)? {
            let mut words = list(range)?.into_iter();
            let (first, last) = (words.next()?.as_u64()?, words.next()?.as_u64()?);
            let owner = node(words.next()?, asked)?;
            let place = match owner {
                Some(owner) => slots.place_of(owner)?,
                None => NOBODY,
            };
            slots.owners.get_mut(usize::try_from(first).ok()?..=usize::try_from(last).ok()?)?.fill(place);
            for replica in words {
                if let Some(replica) = node(replica, asked)?
                    && !slots.replicas.contains(&replica)
                {
                    slots.replicas.push(replica);
                }
            }
        }
        Some(slots)
    }

    /// The primary that keeps a slot.
    pub(super) fn owner(&self, slot: u16) -> Option<&Server> {
        self.primaries.get(usize::from(*self.owners.get(usize::from(slot))?))
    }

    /// The same for all slots of one primary, and of no other.
    pub(super) fn lane(&self, slot: u16) -> u32 {
        self.owners.get(usize::from(slot)).copied().unwrap_or(NOBODY).into()
    }

    /// A slot is somewhere else.
    pub(super) fn set(&mut self, slot: u16, owner: &Server) {
        if let Some(place) = self.place_of(owner.clone())
            && let Some(known) = self.owners.get_mut(usize::from(slot))
        {
            *known = place;
        }
    }

    fn place_of(&mut self, primary: Server) -> Option<u16> {
        let place = self.primaries.iter().position(|known| *known == primary).unwrap_or_else(|| {
            self.primaries.push(primary);
            self.primaries.len() - 1
        });
        u16::try_from(place).ok().filter(|place| *place != NOBODY)
    }

    pub(super) fn primaries(&self) -> &[Server] {
        &self.primaries
    }

    /// The primaries first.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &Server> {
        self.primaries.iter().chain(&self.replicas)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.primaries.is_empty()
    }
}

/// An address of IPv6 in the form in which a host and a port are told apart.
pub(super) fn server(host: &str, port: u16) -> Server {
    if host.contains(':') && !host.starts_with('[') {
        Server::new(format!("[{host}]"), port)
    } else {
        Server::new(host, port)
    }
}

/// `[host, port, ..]`; `None` within for a host that the asked node doesn't know.
#[allow(clippy::option_option, reason = "unreadable, or readable and without an address")]
fn node(words: Value, asked: &Server) -> Option<Option<Server>> {
    let mut words = list(words)?.into_iter();
    let (host, port) = (words.next()?, u16::try_from(words.next()?.as_u64()?).ok()?);
    let host = match host.as_str().as_deref() {
        None | Some("") => asked.host.to_string(),
        Some("?") => return Some(None),
        Some(host) => host.to_owned(),
    };
    Some(Some(server(&host, port)))
}

fn list(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Server {
        Server::new("h", port)
    }

    fn said(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Integer(port), Value::from_static_str("id"), Value::Array(vec![])])
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        let mut words = vec![Value::Integer(first), Value::Integer(last)];
        words.extend(nodes);
        Value::Array(words)
    }

    #[test]
    fn a_slot_is_kept_by_the_first_of_its_range() {
        let h = || Value::from_static_str("h");
        let answer = Value::Array(vec![
            range(0, 5, vec![said(h(), 1), said(h(), 4)]),
            range(7, 7, vec![said(h(), 2)]),
            range(8, 16383, vec![said(h(), 1), said(h(), 4)]),
        ]);
        let mut slots = Slots::read(answer, &at(9)).unwrap();
        assert_eq!((slots.owner(0), slots.owner(5), slots.owner(6)), (Some(&at(1)), Some(&at(1)), None));
        assert_eq!((slots.owner(7), slots.owner(16383)), (Some(&at(2)), Some(&at(1))));
        assert_eq!(slots.primaries(), [at(1), at(2)]);
        assert_eq!(slots.nodes().cloned().collect::<Vec<_>>(), [at(1), at(2), at(4)]);
        slots.set(6, &at(5));
        slots.set(7, &at(1));
        assert_eq!((slots.owner(6), slots.owner(7), slots.owner(8)), (Some(&at(5)), Some(&at(1)), Some(&at(1))));
    }

    #[test]
    fn a_node_without_an_address_is_where_it_was_asked_and_one_without_a_name_nowhere() {
        let answer = Value::Array(vec![
            range(0, 0, vec![said(Value::Null, 1)]),
            range(1, 1, vec![said(Value::from_static_str(""), 2)]),
            range(2, 2, vec![said(Value::from_static_str("?"), 3)]),
            range(3, 3, vec![said(Value::from_static_str("::1"), 4)]),
        ]);
        let slots = Slots::read(answer, &at(9)).unwrap();
        assert_eq!((slots.owner(0), slots.owner(1), slots.owner(2)), (Some(&at(1)), Some(&at(2)), None));
        assert_eq!(slots.owner(3).unwrap().to_string(), "[::1]:4");
    }

    #[test]
    fn what_is_no_map_is_not_read_as_one() {
        for odd in [
            Value::Null,
            Value::Array(vec![Value::Null]),
            Value::Array(vec![range(0, 16384, vec![said(Value::Null, 1)])]),
            Value::Array(vec![range(6, 4, vec![said(Value::Null, 1)])]),
            Value::Array(vec![range(0, 1, vec![said(Value::Null, 70_000)])]),
            Value::Array(vec![range(0, 1, vec![])]),
        ] {
            assert!(Slots::read(odd.clone(), &at(9)).is_none(), "{odd:?}");
        }
        assert!(Slots::read(Value::Array(vec![]), &at(9)).unwrap().is_empty());
        assert_eq!(Slots::default().owner(3), None);
    }
}
