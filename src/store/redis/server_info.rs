//! What a server says about itself, and what of it may betray a lease.
use std::fmt;

/// The oldest version that the page runs on.
const OLDEST: (u32, u32) = (6, 0);

/// What `INFO` says. What it doesn't say is taken for what it should be.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ServerInfo {
    pub(super) version: Option<(u32, u32)>,
    pub(super) replica: bool,
    pub(super) in_cluster: bool,
    /// The eviction policy, if it is one that evicts.
    evicts: Option<String>,
    /// No limit is set, so nothing is evicted as yet.
    unlimited: bool,
}

impl ServerInfo {
    pub(super) fn read(info: &str) -> Self {
        let mut read = ServerInfo::default();
        for (name, value) in info.lines().filter_map(|line| line.trim_end().split_once(':')) {
            match name {
                "redis_version" => read.version = version(value),
                "role" => read.replica = value == "slave",
                "cluster_enabled" => read.in_cluster = value == "1",
                "maxmemory_policy" if value != "noeviction" => read.evicts = Some(value.to_owned()),
                "maxmemory" => read.unlimited = value == "0",
                _ => {}
            }
        }
        read
    }

    /// What may betray a lease, each with the setting to change.
    pub(super) fn doubts(&self) -> Vec<Doubt> {
        let mut doubts = vec![];
        if let Some((major, minor)) = self.version.filter(|version| *version < OLDEST) {
            let (oldest, _) = OLDEST;
            let said = format!("Redis {major}.{minor} is too old for leasehold: upgrade it to {oldest}.0 or later");
            doubts.push(Doubt { setting: "version", said });
        }
        if self.replica {
            let said = "this server is a replica, and only a primary keeps leases: connect to its primary, or let sentinels \
                        name it (`redis-sentinel://`)";
            doubts.push(Doubt { setting: "replicaof", said: said.to_owned() });
        }
        if let Some(policy) = &self.evicts {
            let when = if self.unlimited { "as soon as it has a `maxmemory`" } else { "when memory is short" };
            let said = format!(
                "Redis may evict leases {when}, for every key of theirs has a TTL: set `maxmemory-policy noeviction` (it is \
                 `{policy}`)"
            );
            doubts.push(Doubt { setting: "maxmemory-policy", said });
        }
        doubts
    }
}

/// Something about a server that may betray a lease, and the setting to change.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Doubt {
    pub(super) setting: &'static str,
    said: String,
}

impl Doubt {
    /// The server does not say what it is.
    pub(super) fn unknown(words: &str) -> Doubt {
        let said = format!(
            "Redis does not say whether it suits leases: allow +info, and look at `maxmemory-policy` ({words})"
        );
        Doubt { setting: "acl", said }
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.said)
    }
}

fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.').map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(info: &str) -> Vec<&'static str> {
        ServerInfo::read(info).doubts().iter().map(|doubt| doubt.setting).collect()
    }

    #[test]
    fn a_server_as_it_should_be_raises_no_doubt_and_neither_does_one_that_says_nothing() {
        let good = "# Server\r\nredis_version:7.2.4\r\nvalkey_version:8.1.1\r\nrole:master\r\nmaxmemory:0\r\n\
                    maxmemory_policy:noeviction\r\ncluster_enabled:0\r\n";
        assert_eq!(settings(good), [""; 0]);
        assert_eq!(settings(""), [""; 0]);
        assert_eq!(settings("redis_version:6.0.0\r\n"), [""; 0]);
        assert_eq!(settings("redis_version:unstable\r\n"), [""; 0]);
    }

    #[test]
    fn what_may_betray_a_lease_is_named_with_its_setting() {
        assert_eq!(settings("redis_version:5.0.14\r\n"), ["version"]);
        assert_eq!(settings("role:slave\r\nmaxmemory_policy:volatile-ttl\r\n"), ["replicaof", "maxmemory-policy"]);
        let doubts =
            |limit| ServerInfo::read(&format!("maxmemory:{limit}\r\nmaxmemory_policy:allkeys-lru\r\n")).doubts();
        assert!(doubts(1000)[0].to_string().contains("short") && doubts(0)[0].to_string().contains("as soon as"));
        assert!(ServerInfo::read("cluster_enabled:1\r\n").in_cluster);
    }
}
