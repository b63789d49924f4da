//! What a member of a cluster says instead of doing what it was asked. Nothing was carried out then.
use super::{super::server_error::ServerError, slots::server};
use crate::error::StoreError;
use fred::types::config::Server;
use std::error::Error as _;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// The slot is kept by that server.
    Moved(Server),
    /// The slot is being moved to that server, and has the keys already, or nobody has them.
    Ask(Server),
    /// The slot is being moved, and some of the keys are there and some here.
    TryAgain,
    /// The cluster serves nothing, or not this slot.
    Down,
    /// It is a replica.
    Replica,
}

impl Redirect {
    /// Which of these an error is, from that server.
    pub(super) fn of(error: &StoreError, asked: &Server) -> Option<Redirect> {
        let said = error.source()?.downcast_ref::<ServerError>()?;
        let words = said.to_string();
        match said.code() {
            Some("MOVED") => place(&words, asked).map(Redirect::Moved),
            Some("ASK") => place(&words, asked).map(Redirect::Ask),
            Some("TRYAGAIN") => Some(Redirect::TryAgain),
            Some("CLUSTERDOWN") => Some(Redirect::Down),
            Some("READONLY") => Some(Redirect::Replica),
            // A key that had been here when the script began was gone by the time that it looked again.
            _ if words.contains("attempted to access a non local key") => Some(Redirect::TryAgain),
            _ => None,
        }
    }
}

/// `MOVED 3999 127.0.0.1:6381`. A server that does not say its host is where it was asked.
fn place(words: &str, asked: &Server) -> Option<Server> {
    let (host, port) = words.split(' ').nth(2)?.rsplit_once(':')?;
    let port = port.parse().ok()?;
    match host {
        "?" => None,
        "" => Some(server(&asked.host, port)),
        host => Some(server(host, port)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirection_is_told_by_the_servers_words_alone() {
        let asked = Server::new("h", 1);
        let of = |words: &str| Redirect::of(&ServerError::new(words).classify(), &asked);
        assert_eq!(of("MOVED 3999 10.0.0.1:6381"), Some(Redirect::Moved(Server::new("10.0.0.1", 6381))));
        assert_eq!(of("MOVED 3999 :6381"), Some(Redirect::Moved(Server::new("h", 6381))));
        assert_eq!(of("ASK 3999 ::1:6381"), Some(Redirect::Ask(Server::new("[::1]", 6381))));
        assert_eq!(of("TRYAGAIN Multiple keys request during rehashing of slot"), Some(Redirect::TryAgain));
        assert_eq!(of("CLUSTERDOWN Hash slot not served"), Some(Redirect::Down));
        assert_eq!(of("READONLY You can't write against a read only replica."), Some(Redirect::Replica));
        let gone = "ERR Script attempted to access a non local key in a cluster node script: 1, on @user_script:9.";
        assert_eq!(of(gone), Some(Redirect::TryAgain));
        for other in ["MOVED 3999", "MOVED 3999 ?:1", "ASK 1 h:x", "OOM no", "Connection closed."] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(Redirect::of(&StoreError::unavailable("MOVED 3999 h:1"), &asked), None);
    }
}
