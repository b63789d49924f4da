//! The subscription on which the server leaves word of grants and forced losses.
//!
//! It only ever speeds things up: whoever waits also asks. So nothing here is retried in a hurry, and a server that
//! permits no subscription is only slower to wait on.
use super::{address::Address, wire::Wire};
use crate::{Key, clock::jittered, error::StoreError, store::Pushes};
use fred::{
    error::Error as FredError,
    interfaces::{ClientLike, EventInterface, PubsubInterface},
    types::{Message, Value},
};
use std::time::Duration;
use tokio::{
    sync::broadcast::{Receiver, error::RecvError},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// Words that may wait to be heard. When more come, everybody who waits is told to ask.
const ROOM: usize = 1024;

/// How often a quiet connection is tried: a dead one shows by nothing else.
const TRIED_EVERY: Duration = Duration::from_secs(5);

/// The shortest and the longest pause before the next attempt to subscribe.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The pause after a refusal: what the server refuses, it will refuse for a while.
const REFUSED: Duration = Duration::from_secs(30);

/// A subscription that lasted this long was a good one. After a shorter one the pauses go on growing, for each new one
/// makes everybody ask.
const STEADY: Duration = Duration::from_secs(10);

/// Hears for one `Leases`, until `closed` or nobody listens.
pub(super) async fn hear(address: Address, patience: Duration, to: Pushes, closed: CancellationToken) {
    let inbox = Inbox { address, patience, channel: format!("leasehold:{}", to.inbox()), to };
    tokio::select! {
        () = closed.cancelled() => {}
        () = inbox.hear() => {}
    }
}

struct Inbox {
    address: Address,
    patience: Duration,
    channel: String,
    to: Pushes,
}

/// Why hearing has ended.
enum End {
    /// Nobody listens any more.
    Unheard,
    Lost(StoreError),
}

/// How long to pause before the next attempt to subscribe.
struct Pauses {
    next: Duration,
}

impl Pauses {
    fn new() -> Self {
        Pauses { next: PAUSE.0 }
    }

    fn after(&mut self, why: &StoreError) -> Duration {
        let pause = if why.may_pass() { self.next } else { REFUSED };
        self.next = (self.next * 2).min(PAUSE.1);
        pause
    }
}

impl Inbox {
    async fn hear(self) {
        let mut pauses = Pauses::new();
        // Trouble is told when it begins and when it ends, not each time.
        let mut troubled = false;
        while !self.to.is_closed() {
            let why = match self.subscribe().await {
                Ok((wire, words)) => {
                    if troubled {
                        tracing::info!(server = %self.address, "hears from Redis again");
                    }
                    let since = Instant::now();
                    let End::Lost(why) = self.listen(wire, words).await else { return };
                    if since.elapsed() >= STEADY {
                        (pauses, troubled) = (Pauses::new(), false);
                    }
                    why
                }
                Err(why) => why,
            };
            if std::mem::replace(&mut troubled, true) {
                tracing::debug!(server = %self.address, %why, "still cannot hear from Redis");
            } else {
                tracing::warn!(server = %self.address, %why, "cannot hear from Redis; whoever waits asks instead");
            }
            tokio::time::sleep(jittered(pauses.after(&why))).await;
        }
    }

    /// A subscription that the server has confirmed.
    async fn subscribe(&self) -> Result<(Wire, Receiver<Message>), StoreError> {
        let wire = Wire::open_for_words(&self.address, ROOM).await?;
        let words = wire.client.message_rx();
        let subscribed = async {
            wire.client.subscribe(self.channel.as_str()).await?;
            // A subscription is answered by nothing that could be waited for, and a refusal of it by what the next command
            // is told. So one command more on the same connection: its answer comes after the server's decision.
            wire.client.ping::<Value>(None).await
        };
        self.in_time(subscribed).await?;
        Ok((wire, words))
    }

    async fn listen(&self, mut wire: Wire, mut words: Receiver<Message>) -> End {
        // What was said while nobody heard is gone.
        if !self.to.missed() {
            return End::Unheard;
        }
        let client = wire.client.clone();
        loop {
            let heard = tokio::select! {
                biased;
                word = words.recv() => match word {
                    Ok(word) => self.understand(&word.value),
                    Err(RecvError::Lagged(_)) => self.to.missed(),
                    Err(RecvError::Closed) => return End::Lost(StoreError::unavailable("the subscription ended")),
                },
                why = wire.ended() => return End::Lost(why),
                () = tokio::time::sleep(TRIED_EVERY) => match self.in_time(client.ping::<Value>(None)).await {
                    Ok(()) => !self.to.is_closed(),
                    Err(why) => return End::Lost(why),
                },
            };
            if !heard {
                return End::Unheard;
            }
        }
    }

    async fn in_time(&self, asked: impl Future<Output = Result<Value, FredError>>) -> Result<(), StoreError> {
        match tokio::time::timeout(self.patience, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(super::wire::explain(error)),
            Err(_) => Err(StoreError::unavailable("the subscription was not confirmed in time")),
        }
    }

    /// Whether anybody still listens. What isn't understood is no word of ours.
    fn understand(&self, word: &Value) -> bool {
        let Some(text) = word.as_str() else { return true };
        let mut parts = text.splitn(2, ' ');
        match (parts.next(), parts.next()) {
            (Some("granted"), Some(rest)) => {
                granted(rest).is_none_or(|(fence, length, owner)| {
                    // Nobody has counted the replicas that have it: its own claim will.
                    let length = if self.address.replicas().is_some() { Duration::ZERO } else { length };
                    self.to.granted(owner, fence, length)
                })
            }
            (Some("forced"), Some(rest)) => {
                forced(rest).is_none_or(|(fence, key)| self.to.forced(&Key::from(key), fence))
            }
            _ => true,
        }
    }
}

/// `<fence> <ms> <owner>`
fn granted(text: &str) -> Option<(u64, Duration, &str)> {
    let (fence, rest) = text.split_once(' ')?;
    let (length, owner) = rest.split_once(' ')?;
    Some((fence.parse().ok()?, Duration::from_millis(length.parse().ok()?), owner))
}

/// `<fence> <key>`
fn forced(text: &str) -> Option<(u64, &str)> {
    let (fence, key) = text.split_once(' ')?;
    Some((fence.parse().ok()?, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_few_seconds_and_a_refusal_is_given_longer() {
        let mut pauses = Pauses::new();
        let cut = StoreError::unavailable("cut");
        let grown: Vec<_> = (0..8).map(|_| pauses.after(&cut).as_millis()).collect();
        assert_eq!(grown, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(pauses.after(&StoreError::refused("no permission")), Duration::from_secs(30));
    }

    #[test]
    fn words_are_read_as_the_page_writes_them() {
        assert_eq!(granted("17 3000 h:1/0/u"), Some((17, Duration::from_secs(3), "h:1/0/u")));
        assert_eq!(forced("17 a key with spaces"), Some((17, "a key with spaces")));
        for bad in ["", "17", "x 3000 o", "17 x o"] {
            assert_eq!(granted(bad), None, "{bad:?}");
        }
        assert_eq!(forced("x k"), None);
    }
}
