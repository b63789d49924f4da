//! An operation whose slot is being moved.
//!
//! The server to which it is moved takes what comes behind `ASKING`, and of that only what has one key, or all of whose
//! keys it has. But rarely do all keys of a lease exist, so nothing could be acquired while a slot is being moved. A server
//! from which it is moved says `ASK` only if it has none of the keys that were declared to it, and it makes none; so they
//! are with the other or nowhere, and it is enough to declare the first.
//!
//! It says `TRYAGAIN` if it has some: most leases have no line. Then a lease can be looked at and ended by its first key
//! alone. Should there be a line after all, on the other side, whoever is first in it asks within a poll.
use super::super::{
    protocol::{Op, PAGE, Sending},
    wire::{Failure, Sent, decode, failure, number},
};
use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{ClusterHash, CustomCommand, Value},
};
use std::sync::LazyLock;

/// The page, for a server to which only the first key is declared.
static UNDECLARED: LazyLock<String> = LazyLock::new(|| format!("{}{PAGE}", include_str!("asking.lua")));

/// The page, for what can be done with the first key alone.
static BARE: LazyLock<String> = LazyLock::new(|| format!("{}{PAGE}", include_str!("bare.lua")));

/// What it is sent with goes out together when this is first polled. The script goes by its text, for a server without it
/// would forget that it was asked.
pub(in super::super) fn send(client: &Client, op: &Op, words: impl IntoIterator<Item = Value>) -> Sent {
    let (page, all_keys, asking) = match op.sending {
        Sending::Listed | Sending::Alone => (PAGE, true, false),
        Sending::Asking { all_keys: true } => (PAGE, true, true),
        Sending::Asking { all_keys: false } => (UNDECLARED.as_str(), false, true),
        Sending::Bare { asking } => (BARE.as_str(), false, asking),
    };
    let (declared, others) = op.keys.split_at(if all_keys { op.keys.len() } else { 1.min(op.keys.len()) });
    let name = |key: &String| Value::from(key.as_str());
    let mut eval = vec![Value::from(page), number(declared.len() as u64)];
    eval.extend(declared.iter().map(name));
    if !all_keys {
        eval.push(number(others.len() as u64));
        eval.extend(others.iter().map(name));
    }
    eval.extend(words);
    let pipeline = client.pipeline();
    Box::pin(async move {
        let command = |name| CustomCommand::new_static(name, ClusterHash::Random, false);
        if asking {
            pipeline.custom::<(), Value>(command("ASKING"), vec![]).await.map_err(failure)?;
        }
        pipeline.custom::<(), Value>(command("EVAL"), eval).await.map_err(failure)?;
        let mut last = Err(Failure::Lost(super::over()));
        for said in pipeline.try_all::<Value>().await {
            // Whoever may not ask is told so, and not what comes of it.
            last = Ok(said.map_err(failure)?);
        }
        decode(last?, 1)
    })
}
