//! An operation for a server to which its slot is being moved.
//!
//! Such a server takes what comes behind `ASKING`, and of that only what has one key, or all of whose keys it has. But
//! rarely do all keys of a lease exist, so nothing could be acquired while a slot is being moved. A server from which
//! it is moved says `ASK` only if it has none of the keys that were declared to it, and it creates none; so they are
//! with the other or nowhere, and it is enough to declare the first.
use super::super::{
    protocol::{Op, PAGE},
    wire::{Failure, Sent, decode, failure, number},
};
use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{ClusterHash, CustomCommand, Value},
};
use std::sync::LazyLock;

/// The page, for a server to which one key was declared.
static UNDECLARED: LazyLock<String> = LazyLock::new(|| format!("{}{PAGE}", include_str!("asking.lua")));

/// Both commands go out together when this is first polled. By its text, for a server without the page would forget that
/// it was asked.
pub(in super::super) fn send(client: &Client, op: &Op, all_keys: bool, words: impl IntoIterator<Item = Value>) -> Sent {
    let declared = if all_keys { op.keys.len() } else { 1 };
    let mut eval = vec![Value::from(UNDECLARED.as_str()), number(declared as u64)];
    let (declared, others) = op.keys.split_at(declared.min(op.keys.len()));
    let name = |key: &String| Value::from(key.as_str());
    if others.is_empty() {
        eval[0] = Value::from_static_str(PAGE);
        eval.extend(declared.iter().map(name));
    } else {
        eval.extend(declared.iter().map(name));
        eval.push(number(others.len() as u64));
        eval.extend(others.iter().map(name));
    }
    eval.extend(words);
    let pipeline = client.pipeline();
    Box::pin(async move {
        let command = |name| CustomCommand::new_static(name, ClusterHash::Random, false);
        pipeline.custom::<(), Value>(command("ASKING"), vec![]).await.map_err(failure)?;
        pipeline.custom::<(), Value>(command("EVAL"), eval).await.map_err(failure)?;
        let mut last = Err(Failure::Lost(super::over()));
        for said in pipeline.try_all::<Value>().await {
            // Whoever may not ask is told so, and not what comes of it.
            last = Ok(said.map_err(failure)?);
        }
        decode(last?, 1)
    })
}
