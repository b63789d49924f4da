//! What a server says when it does not do what it was asked.
use crate::error::StoreError;

/// An error of the server's, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct ServerError(String);

impl ServerError {
    pub(super) fn new(text: &str) -> Self {
        // Redis 6 puts "@user_script: 12: " before an error that a script met.
        let text = match text.strip_prefix("@user_script: ").and_then(|t| t.split_once(": ")) {
            Some((line, words)) if line.bytes().all(|b| b.is_ascii_digit()) => words,
            _ => text,
        };
        ServerError(text.to_owned())
    }

    /// The word in capitals that says what kind of error it is; `None` in words that no server chose.
    pub(super) fn code(&self) -> Option<&str> {
        let code = self.0.split(' ').next()?;
        (code.len() > 1 && code.bytes().all(|b| b.is_ascii_uppercase())).then_some(code)
    }

    /// The server doesn't have the page.
    pub(super) fn is_no_script(&self) -> bool {
        self.code() == Some("NOSCRIPT")
    }

    /// This server is no primary, or no longer: the connection leads to the wrong place.
    pub(super) fn is_read_only(&self) -> bool {
        self.code() == Some("READONLY")
    }

    /// A permission is missing. Redis 7.2 and later say which also when a script met it.
    fn lacks(&self) -> StoreError {
        let command = self.0.split_once("run the '").and_then(|(_, rest)| rest.split_once('\''));
        match command {
            Some(("wait", _)) => StoreError::refused("the Redis user lacks +wait, which `replicas` needs"),
            Some((command, _)) => {
                StoreError::refused(format!("the Redis user lacks +{command}; leasehold needs {PERMISSIONS}"))
            }
            None => StoreError::refused(format!("the Redis user lacks a permission; leasehold needs {PERMISSIONS}")),
        }
    }

    /// What it means for whoever asked, and what to do about it.
    pub(super) fn classify(self) -> StoreError {
        let unavailable = |what: &'static str| StoreError::unavailable(what);
        let refused = |what: &'static str| StoreError::refused(what);
        let denied = self.0.contains("The user executing the script") || self.0.contains("ACL failure in script");
        let error = match self.code() {
            Some("NOPERM") => self.lacks(),
            _ if denied => self.lacks(),
            Some("LOADING") => unavailable("Redis is loading its data; it will answer when that is done"),
            Some("BUSY") => {
                unavailable("Redis is busy with somebody's script; it can be ended with SCRIPT KILL or FUNCTION KILL")
            }
            Some("CLUSTERDOWN") => unavailable("the cluster serves no requests now; see CLUSTER INFO"),
            Some("MASTERDOWN") => unavailable("this replica has lost its primary and serves no stale data"),
            Some("TRYAGAIN" | "MOVED" | "ASK") => unavailable("the cluster is moving this key's slot"),
            Some("READONLY") => unavailable(
                "this server is a replica, and only a primary keeps leases; failing over, or a wrong address?",
            ),
            // Redis writes again by itself once a snapshot succeeds, and once enough replicas are back.
            Some("MISCONF") => {
                unavailable("Redis takes no writes because it cannot save to disk; see its log, and the disk")
            }
            Some("NOREPLICAS") => {
                unavailable("Redis takes no writes because too few replicas follow it; see min-replicas-to-write")
            }
            Some("UNBLOCKED") => {
                unavailable("this server was made a replica while it waited for replicas of its own; failing over?")
            }
            Some("ERR") if self.0.starts_with("ERR WAIT cannot be used with replica") => unavailable(
                "this server is a replica, and only a primary keeps leases; failing over, or a wrong address?",
            ),
            Some("ERR") if self.0.starts_with("ERR unknown command") && self.0.contains("WAIT") => refused(
                "the server knows no WAIT, and without it cannot say how many replicas have a lease; leave out `replicas`",
            ),
            Some("NOAUTH") => refused("Redis asks for a password; put it in the URL: redis://user:password@host"),
            Some("WRONGPASS") => refused("Redis knows no such user with this password; check both in the URL"),
            Some("WRONGTYPE") => {
                refused("the key, or a companion of it, holds something of another type; use another key")
            }
            Some("OOM") => refused("Redis is out of memory; raise maxmemory, or let it evict what is no lease"),
            Some("CROSSSLOT") => refused("the server is a member of a cluster; name the cluster: redis-cluster://"),
            Some("FENCE") => {
                refused("a fence would reach 2^53; the counter was set by hand, so delete the `:fence` key")
            }
            Some("LEASE") => refused("the key is that of a lease; keep the value under another key"),
            Some("MARK") => refused("the `:mark` key of this value is not a fence; was it written by hand?"),
            Some("ERR") if self.0.starts_with("ERR max number of clients") => {
                unavailable("Redis has as many clients as it allows; see maxclients")
            }
            Some("ERR") if self.0.contains("AUTH") || self.0.contains("invalid password") => {
                refused("Redis did not take the password; check user and password in the URL")
            }
            Some("ERR") if self.0.contains("DB index is out of range") => {
                refused("Redis has no such database; check the number at the end of the URL")
            }
            Some("ERR") if self.0.contains("invalid expire") || self.0.contains("not an integer or out of range") => {
                refused("Redis takes no TTL of that length; choose a shorter one")
            }
            _ => refused("Redis refused for a reason of its own; its words follow"),
        };
        error.with_source(self)
    }
}

/// What a user of leasehold must be allowed to do.
const PERMISSIONS: &str = "+ping +info +eval +evalsha +time +get +set +del +exists +strlen +pttl +pexpire +zadd +zscore \
    +zrank +zrange +zrevrange +zcard +zrem +zremrangebyrank +hset +hmget +hdel +publish +subscribe, ~ for the keys, and \
    &leasehold:*";

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn a_servers_error_is_told_by_its_first_word_and_its_text_is_kept() {
        for may_pass in [
            "LOADING",
            "BUSY",
            "CLUSTERDOWN",
            "MASTERDOWN",
            "TRYAGAIN",
            "MOVED",
            "ASK",
            "READONLY",
            "MISCONF",
            "NOREPLICAS",
        ] {
            let text = format!("{may_pass} because");
            let error = ServerError::new(&text).classify();
            assert!(error.may_pass(), "{error}");
            assert_eq!(error.source().unwrap().to_string(), text);
        }
        for stays in ["NOPERM", "NOAUTH", "WRONGPASS", "WRONGTYPE", "OOM", "CROSSSLOT", "FENCE", "ERR", "NEW"] {
            let error = ServerError::new(&format!("{stays} because")).classify();
            assert!(!error.may_pass(), "{error}");
        }
        assert!(ServerError::new("ERR max number of clients reached").classify().may_pass());
        for a_replica in ["UNBLOCKED force unblock from", "ERR WAIT cannot be used with replica instances. Please"] {
            assert!(ServerError::new(a_replica).classify().may_pass(), "{a_replica}");
        }
    }

    #[test]
    fn whoever_reads_an_error_learns_what_to_do_about_it() {
        for (said, advice) in [
            ("NOPERM User u has no permissions to run the 'eval' command", "lacks +eval;"),
            ("NOPERM No permissions to access a key", "lacks a permission"),
            ("The user executing the script can't run this command", "lacks a permission"),
            ("ERR ACL failure in script: User u has no permissions", "lacks a permission"),
            ("LOADING Redis is loading the dataset in memory", "loading its data"),
            ("BUSY Redis is busy running a script", "SCRIPT KILL"),
            ("CLUSTERDOWN Hash slot not served", "CLUSTER INFO"),
            ("MASTERDOWN Link with MASTER is down", "has lost its primary"),
            ("TRYAGAIN Multiple keys request during rehashing of slot", "moving this key's slot"),
            ("READONLY You can't write against a read only replica.", "is a replica"),
            ("MISCONF Redis is configured to save RDB snapshots", "cannot save to disk"),
            ("NOREPLICAS Not enough good replicas to write.", "min-replicas-to-write"),
            ("NOAUTH Authentication required.", "asks for a password"),
            ("WRONGPASS invalid username-password pair", "no such user"),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", "another type"),
            ("OOM command not allowed when used memory > 'maxmemory'.", "maxmemory"),
            ("CROSSSLOT Keys in request don't hash to the same slot", "redis-cluster://"),
            ("MOVED 3999 127.0.0.1:6381", "moving this key's slot"),
            ("ASK 3999 127.0.0.1:6381", "moving this key's slot"),
            ("FENCE too large", "2^53"),
            ("LEASE the key is that of a lease", "under another key"),
            ("MARK not a fence", "`:mark` key"),
            ("ERR max number of clients reached", "maxclients"),
            ("ERR AUTH <password> called without any password configured", "did not take the password"),
            ("ERR invalid password", "did not take the password"),
            ("ERR DB index is out of range", "no such database"),
            ("ERR invalid expire time in 'set' command", "no TTL of that length"),
            ("ERR value is not an integer or out of range", "no TTL of that length"),
            ("ERR unknown command 'EVALSHA'", "a reason of its own"),
            ("ERR unknown command 'WAIT', with args beginning with: '0' '1' ", "leave out `replicas`"),
            ("NEW words", "a reason of its own"),
        ] {
            let error = ServerError::new(said).classify();
            assert!(error.to_string().contains(advice), "{said}: {error}");
        }
    }

    #[test]
    fn what_redis_6_puts_before_an_error_in_a_script_is_taken_off() {
        let error = ServerError::new("@user_script: 57: OOM command not allowed when used memory > 'maxmemory'.");
        assert_eq!(error.code(), Some("OOM"));
        assert!(!error.to_string().contains("user_script"));
        let denied = ServerError::new("@user_script: 3: The user executing the script can't run this command");
        let denied = denied.classify();
        assert!(!denied.may_pass() && denied.to_string().contains(PERMISSIONS), "{denied}");
        assert_eq!(denied.source().unwrap().to_string(), "The user executing the script can't run this command");
    }

    #[test]
    fn a_permission_that_the_server_names_is_named_first() {
        for words in [
            "NOPERM this user has no permissions to run the 'subscribe' command",
            "ACL failure in script: User w has no permissions to run the 'subscribe' command",
        ] {
            let denied = ServerError::new(words).classify();
            assert!(denied.to_string().starts_with("the store refused: the Redis user lacks +subscribe;"), "{denied}");
        }
    }

    #[test]
    fn a_server_without_the_page_and_one_that_is_a_replica_are_known_by_their_word() {
        let [no_script, read_only] = ["NOSCRIPT No matching script.", "READONLY You can't write"].map(ServerError::new);
        assert!(no_script.is_no_script() && !read_only.is_no_script());
        assert!(read_only.is_read_only() && !no_script.is_read_only());
    }

    #[test]
    fn words_that_no_server_chose_have_no_code() {
        for words in ["Connection closed.", "", "I", "Failed to route command."] {
            assert_eq!(ServerError::new(words).code(), None, "{words}");
        }
    }
}
