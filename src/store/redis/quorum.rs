//! Redis servers as the members of a quorum.
use super::{Address, Answer, Op, RedisStore, Routes, Settings, Way, link::Link};
use crate::{
    clock::Clock,
    error::{Error, Invalid, StoreError},
    store::quorum::{Hold, Kept, Member, Proposal, Proposed, QuorumStore, Size, check_size},
};
use futures_util::future::join_all;
use tokio::runtime::Handle;

impl Member for RedisStore {
    async fn propose(&self, proposal: &Proposal) -> Result<Proposed, StoreError> {
        if self.address.replicas().is_some() {
            return Err(StoreError::refused(
                "a member of a quorum asks for no `replicas`: a majority of the members has each lease",
            ));
        }
        self.routes.ask(Op::propose(proposal, self.clock.now())).await?.proposed()
    }

    /// What only confirms a proposal follows it on its link; renewals go with renewals.
    async fn hold_all(&self, list: &[Hold]) -> Vec<Result<Kept, StoreError>> {
        let asked = self.clock.now();
        let way = if list.iter().all(|hold| hold.create) { Way::Renewals } else { Way::Main };
        let answers = self.routes.ask_all(way, list.iter().map(|hold| Op::hold(hold, asked))).await;
        answers.into_iter().map(|answer| answer.as_ref().map_err(Clone::clone).and_then(Answer::kept)).collect()
    }
}

impl QuorumStore<RedisStore> {
    /// Connects to each of these servers, which are the members, as [`RedisStore::connect`] does. One that cannot be
    /// reached now is connected to later, as long as a majority can.
    ///
    /// # Errors
    /// [`Error::Invalid`] when they are no odd number of at least three different servers, or a URL is not of that form;
    /// [`Error::Store`] when no majority answers, or any of them refuses the user or the script.
    pub async fn connect(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, Error> {
        Self::connect_with(addresses(urls)?, Settings::default()).await
    }

    pub(crate) async fn connect_with(addresses: Vec<Address>, settings: Settings) -> Result<Self, Error> {
        let size = Size::of(addresses.len());
        let (mut members, mut absent) = (Vec::new(), Vec::new());
        for (member, trouble) in join_all(addresses.into_iter().map(|address| open(address, settings))).await {
            members.push(member);
            absent.extend(trouble);
        }
        let failed = |source| Error::Store { attempted: "connect", key: None, source };
        // A refusal won't pass by itself, though the others might do without.
        if let Some(refused) = absent.iter().find(|why| !why.may_pass()) {
            return Err(failed(refused.clone()));
        }
        match absent.pop() {
            Some(last) if size.blocks(absent.len() + 1) => {
                let (absent, all) = (absent.len() + 1, size.members);
                let words = format!("no majority of the quorum is there: {absent} of {all} members did not answer");
                return Err(failed(StoreError::unavailable(words).with_source(last)));
            }
            Some(last) => tracing::warn!(%last, "a member of the quorum is not there yet; it is tried again"),
            None => {}
        }
        Ok(Self::on(members, Clock::system(), Some(Handle::current()))?)
    }
}

/// # Errors
/// As [`QuorumStore::connect`].
pub(crate) fn addresses(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Vec<Address>, Invalid> {
    let mut addresses: Vec<Address> = Vec::new();
    for url in urls {
        let address = Address::parse(url.as_ref())?;
        if !address.stays() {
            // Its age would be the new primary's, which may never have heard of what the old one gave away.
            return Err(Invalid::new(
                "quorum",
                "single servers (`redis://`), not those that sentinels or a cluster replace",
            ));
        }
        if addresses.iter().any(|other| other.to_string().eq_ignore_ascii_case(&address.to_string())) {
            return Err(Invalid::new("quorum", "different servers: one that is named twice would vote twice"));
        }
        addresses.push(address);
    }
    check_size(addresses.len())?;
    Ok(addresses)
}

async fn open(address: Address, settings: Settings) -> (RedisStore, Option<StoreError>) {
    let open = || Link::open_in_time(address.clone(), settings.patience);
    let ((main, no_main), (renewals, no_renewals)) = tokio::join!(open(), open());
    (RedisStore::over(address, settings, Routes::Server { main, renewals }), no_main.or(no_renewals))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(urls: &[&str]) -> Option<&'static str> {
        addresses(urls).err().map(|invalid| invalid.rule)
    }

    #[test]
    fn a_quorum_is_an_odd_number_of_different_servers() {
        assert_eq!(rule(&["redis://a", "redis://b", "redis://c"]), None);
        for few in [
            &[][..],
            &["redis://a"],
            &["redis://a", "redis://b"],
            &["redis://a", "redis://b", "redis://c", "redis://d"],
        ] {
            assert!(rule(few).is_some_and(|rule| rule.contains("odd")), "{few:?}");
        }
        let twice = rule(&["redis://a", "redis://b:7", "redis://user:p@A:6379/1"]);
        assert!(twice.is_some_and(|rule| rule.contains("twice")), "{twice:?}");
        let replaced = rule(&["redis://a", "redis://b", "redis-sentinel://c:1?sentinelServiceName=m"]);
        assert!(replaced.is_some_and(|rule| rule.contains("single servers")), "{replaced:?}");
        assert!(rule(&["redis://a", "redis://b", "http://c"]).is_some_and(|rule| rule.contains("starts with")));
    }
}
