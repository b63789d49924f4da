//! The rules, each a sentence and the shortest story that would break it.
use super::{LONG, Rules, SHORT, Saw, Trial, about, draw, drift, must};
use crate::{
    Key,
    owner::Identity,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote, pushes::Push},
};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

/// Neither the shortest nor the longest TTL of a story.
const MIDDLE: Duration = Duration::from_secs(20);

/// Whether it makes sense to come again then, while the key is held for [`MIDDLE`]: not at once, and not too late.
fn can_be_kept(retry_in: Option<Duration>) -> bool {
    retry_in.is_none_or(|retry_in| !retry_in.is_zero() && retry_in <= about(MIDDLE))
}

/// Who holds a key, and who may change that.
pub(super) fn ownership<S: Store>(all: &mut Rules<S>) {
    all.rule("a free key is given to who asks, and to nobody else", |t| async move {
        must!(t.inspect().await, Ok(None));
        t.hold(&t.tries(&t.a)).await?;
        must!(t.claim(&t.tries(&t.b)).await, Ok(Claimed::Busy { .. }));
        Ok(())
    });
    all.rule("of many who ask at once one gets the key", |t| async move {
        let mut asking = JoinSet::new();
        for _ in 0..16 {
            let (store, claim) = (t.store.clone(), t.tries(&draw("many")?));
            asking.spawn(async move { store.claim(&claim).await });
        }
        let answers = asking.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let held = answers.iter().filter(|answer| matches!(answer, Claimed::Held { .. })).count();
        must!(held, 1);
        Ok(())
    });
    all.rule("a claim that is repeated is held under the same fence", |t| async move {
        let mut asking = JoinSet::new();
        for _ in 0..4 {
            let (store, claim) = (t.store.clone(), t.tries(&t.a));
            asking.spawn(async move { store.claim(&claim).await });
        }
        let fence = t.hold(&t.tries(&t.a)).await?;
        for answer in asking.join_all().await {
            must!(answer, Ok(Claimed::Held { fence: same }) if same == fence);
        }
        // Also when it comes late: it asks for an answer that got lost, not for the key.
        must!(t.hold(&Claim { not_after: Duration::ZERO, ..t.tries(&t.a) }).await?, same if same == fence);
        Ok(())
    });
    all.rule("a claim that is late changes nothing", |t| async move {
        let late = t.claim(&Claim { not_after: Duration::ZERO, ..t.tries(&t.a) }).await?;
        // It may have been carried out in the very instant it was sent.
        if late == Claimed::Late {
            must!(t.inspect().await, Ok(None));
        }
        Ok(())
    });
    all.rule("a release frees the key", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        must!(t.release(&t.a).await, Ok(Freed::Released));
        must!(t.inspect().await, Ok(None));
        t.hold(&t.tries(&t.b)).await?;
        Ok(())
    });
    all.rule("only the owner releases", |t| async move {
        let fence = t.hold(&t.tries(&t.a)).await?;
        must!(t.release(&t.b).await, Ok(Freed::Gone));
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Renewed));
        Ok(())
    });
    all.rule("a second release finds nothing, and harms nobody", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        t.release(&t.a).await?;
        must!(t.release(&t.a).await, Ok(Freed::Gone));
        let fence = t.hold(&t.tries(&t.b)).await?;
        must!(t.release(&t.a).await, Ok(Freed::Gone));
        must!(t.renew(&t.b, fence, LONG).await, Ok(Renewed::Renewed));
        Ok(())
    });
    all.rule("only the owner renews", |t| async move {
        let fence = t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        must!(t.renew(&t.b, fence, LONG).await, Ok(Renewed::Taken));
        must!(t.remaining().await?, left if left <= about(MIDDLE));
        Ok(())
    });
    all.rule("only the owner's fence renews", |t| async move {
        let fence = t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        for wrong in [fence.saturating_sub(1), fence + 1] {
            must!(t.renew(&t.a, wrong, LONG).await, Ok(Renewed::Taken));
        }
        must!(t.remaining().await?, left if left <= about(MIDDLE));
        Ok(())
    });
    all.rule("a renewal creates nothing", |t| async move {
        must!(t.renew(&t.a, 1, LONG).await, Ok(Renewed::Gone));
        must!(t.inspect().await, Ok(None));
        let fence = t.hold(&t.tries(&t.a)).await?;
        t.release(&t.a).await?;
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Gone));
        must!(t.inspect().await, Ok(None));
        Ok(())
    });
    all.rule("renewals in a list are answered one by one, in their order", |t| async move {
        let fence = t.hold(&t.tries(&t.a)).await?;
        let mine = Renewal::new(t.key.clone(), t.a.clone(), fence, LONG);
        let taken = Renewal { owner: t.b.clone(), ..mine.clone() };
        let [first, second] = [Ok(Renewed::Taken), Ok(Renewed::Renewed)];
        must!(&t.store.renew_all(&[taken.clone(), mine.clone()]).await[..], [x, y] if *x == first && *y == second);
        // Only renewals of one lane go into one list.
        let lane = t.store.lane(&t.key);
        let mut others = (0..100_000).map(|n| Key::from(format!("{}:{n}", t.key)));
        if let Some(key) = others.find(|key| t.store.lane(key) == lane) {
            let gone = Renewal { key, ..mine };
            must!(&t.store.renew_all(&[gone, taken]).await[..], [Ok(Renewed::Gone), Ok(Renewed::Taken)]);
        }
        must!(&t.store.renew_all(&[]).await[..], []);
        Ok(())
    });
    all.rule("force frees what anybody holds, and says whether anybody did", |t| async move {
        must!(t.store.force_release(&t.key).await, Ok(false));
        let fence = t.hold(&t.tries(&t.a)).await?;
        must!(t.store.force_release(&t.key).await, Ok(true));
        must!(t.store.force_release(&t.key).await, Ok(false));
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Gone));
        t.hold(&t.tries(&t.b)).await?;
        Ok(())
    });
    all.rule("keys that look alike are kept apart, or refused", |t| async move {
        let k = t.key.as_str();
        let mut alike = vec![k.to_owned(), k.to_uppercase(), format!("{k} "), format!("x{{{k}}}"), format!("y{{{k}}}")];
        for part in ["", ":fence", ":queue", ":waiters", ":value"] {
            alike.extend([format!("{k}:{part}"), format!("{{{k}}}{part}")]);
        }
        let mut held = Vec::new();
        for key in alike.into_iter().map(Key::from).filter(|key| t.store.check(key).is_ok()) {
            let claim = Claim { key, ..t.tries(&draw("alike")?) };
            held.push((t.hold(&claim).await?, claim));
        }
        for (fence, Claim { key, owner, .. }) in held {
            let renewal = Renewal::new(key, owner, fence, LONG);
            must!(t.store.renew(&renewal).await, Ok(Renewed::Renewed));
            must!(t.store.release(&renewal.key, &renewal.owner).await, Ok(Freed::Released));
        }
        Ok(())
    });
}

/// How long a lease lasts.
pub(super) fn time<S: Store>(all: &mut Rules<S>) {
    all.rule("what was held is nobody's once its TTL is over", |t| async move {
        let fence = t.hold(&Claim { ttl: SHORT, ..t.tries(&t.a) }).await?;
        t.free_in_the_end().await?;
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Gone));
        must!(t.release(&t.a).await, Ok(Freed::Gone));
        must!(t.store.force_release(&t.key).await, Ok(false));
        t.hold(&t.tries(&t.b)).await?;
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Taken));
        Ok(())
    });
    all.rule("nobody gets a key before its TTL is over", |t| async move {
        let since = Instant::now();
        t.hold(&Claim { ttl: SHORT, ..t.tries(&t.a) }).await?;
        t.hold_in_the_end(&t.tries(&t.b)).await?;
        must!(since.elapsed(), after if after + drift(SHORT) >= SHORT);
        Ok(())
    });
    all.rule("a renewal gives the whole TTL again", |t| async move {
        let fence = t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        let since = Instant::now();
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Renewed));
        t.lasts(LONG, since).await
    });
    all.rule("a renewal never shortens", |t| async move {
        let since = Instant::now();
        let fence = t.hold(&t.tries(&t.a)).await?;
        must!(t.renew(&t.a, fence, SHORT).await, Ok(Renewed::Renewed));
        t.lasts(LONG, since).await
    });
    all.rule("a claim that is repeated gives the whole TTL again", |t| async move {
        t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        let since = Instant::now();
        t.hold(&t.tries(&t.a)).await?;
        t.lasts(LONG, since).await
    });
    all.rule("a claim that is repeated never shortens", |t| async move {
        let since = Instant::now();
        t.hold(&t.tries(&t.a)).await?;
        t.hold(&Claim { ttl: SHORT, ..t.tries(&t.a) }).await?;
        t.lasts(LONG, since).await
    });
    all.rule("who is told when to come again is told a time within the TTL", |t| async move {
        t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        let retry_in = must!(t.claim(&t.tries(&t.b)).await, Ok(Claimed::Busy { retry_in, .. }) => retry_in);
        must!(retry_in, retry_in if can_be_kept(retry_in));
        Ok(())
    });
    all.rule("the holder can be looked up", |t| async move {
        let since = Instant::now();
        let fence = t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        let Holding { label, fence: under, waiters, .. } = must!(t.inspect().await, Ok(Some(holding)) => holding);
        must!((label.as_deref(), under, waiters), (Some("a"), Some(same), 0) if same == fence);
        t.lasts(MIDDLE, since).await
    });
}

/// The number that grows with every ownership of a key.
pub(super) fn fences<S: Store>(all: &mut Rules<S>) {
    all.rule("a fence grows across a release", |t| async move {
        let mut last = t.hold(&t.tries(&t.a)).await?;
        t.release(&t.a).await?;
        // Also when the clock has not moved on.
        for _ in 0..20 {
            let next = draw("next")?;
            let fence = t.hold(&t.tries(&next)).await?;
            must!(fence, fence if fence > last);
            t.release(&next).await?;
            last = fence;
        }
        Ok(())
    });
    all.rule("a fence grows across an expiry", |t| async move {
        let first = t.hold(&Claim { ttl: SHORT, ..t.tries(&t.a) }).await?;
        let second = t.hold_in_the_end(&t.tries(&t.b)).await?;
        must!((first, second), (first, second) if first < second);
        Ok(())
    });
    all.rule("a fence grows across a force", |t| async move {
        let first = t.hold(&t.tries(&t.a)).await?;
        t.store.force_release(&t.key).await?;
        let second = t.hold(&t.tries(&t.b)).await?;
        must!((first, second), (first, second) if first < second);
        Ok(())
    });
    all.rule("a fence stays as it is through renewals", |t| async move {
        let fence = t.hold(&t.tries(&t.a)).await?;
        t.renew(&t.a, fence, LONG).await?;
        must!(t.renew(&t.a, fence, LONG).await, Ok(Renewed::Renewed));
        must!(t.inspect().await, Ok(Some(Holding { fence: Some(same), .. })) if same == fence);
        Ok(())
    });
}

/// The order of those who wait.
pub(super) fn line<S: Store>(all: &mut Rules<S>) {
    all.rule("who waits is told how many come first, and the last fence", |t| async move {
        let fence = t.hold(&Claim { ttl: MIDDLE, ..t.tries(&t.a) }).await?;
        for (n, owner) in (0..).zip([&t.b, &t.c]) {
            let place = t.queue(&t.waits(owner)).await?;
            must!(place.ahead, ahead if ahead == n);
            must!(place.seen, seen if seen >= fence);
            must!(place.retry_in, retry_in if can_be_kept(retry_in));
            must!(t.inspect().await, Ok(Some(Holding { waiters, .. })) if waiters == n + 1);
        }
        Ok(())
    });
    all.rule("who asks again keeps the place, and has only one", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        let first = t.queue(&t.waits(&t.b)).await?;
        let second = t.queue(&t.waits(&t.c)).await?;
        must!((first.ticket, second.ticket), (first, second) if first < second);
        for ticket in [None, Some(first.ticket)] {
            let again = t.queue(&Claim { ticket, ..t.waits(&t.b) }).await?;
            must!(again, again if again.ahead == 0 && again.ticket == first.ticket);
        }
        must!(t.inspect().await, Ok(Some(Holding { waiters: 2, .. })));
        Ok(())
    });
    all.rule("a release leaves the key to the first who waits", |t| async move {
        let before = both_wait(&t).await?;
        must!(t.release(&t.a).await, Ok(Freed::Released));
        must!(first_gets_it(&t).await?, fence if fence > before);
        Ok(())
    });
    all.rule("a force leaves the key to the first who waits", |t| async move {
        let before = both_wait(&t).await?;
        must!(t.store.force_release(&t.key).await, Ok(true));
        must!(first_gets_it(&t).await?, fence if fence > before);
        Ok(())
    });
    all.rule("an expiry leaves the key to the first who waits", |t| async move {
        t.hold(&Claim { ttl: SHORT, ..t.tries(&t.a) }).await?;
        // On a slow server it may be over already.
        if let Claimed::Queued { .. } = t.claim(&t.waits(&t.b)).await? {
            t.free_in_the_end().await?;
            first_gets_it(&t).await?;
        }
        Ok(())
    });
    all.rule("who gets the key has left the line", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        t.queue(&t.waits(&t.b)).await?;
        t.release(&t.a).await?;
        t.hold(&t.waits(&t.b)).await?;
        must!(t.inspect().await, Ok(Some(Holding { waiters: 0, .. })));
        must!(t.release(&t.b).await, Ok(Freed::Released));
        must!(t.inspect().await, Ok(None));
        Ok(())
    });
    all.rule("a release leaves the line", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        t.queue(&t.waits(&t.b)).await?;
        t.queue(&t.waits(&t.c)).await?;
        must!(t.release(&t.b).await, Ok(Freed::Gone));
        must!(t.queue(&t.waits(&t.c)).await?.ahead, 0);
        t.release(&t.a).await?;
        t.hold(&t.waits(&t.c)).await?;
        Ok(())
    });
    all.rule("who waits and dies is passed over in a release", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        t.queue(&silent(&t)).await?;
        t.queue(&t.waits(&t.c)).await?;
        sleep(2 * SHORT).await;
        t.release(&t.a).await?;
        t.hold(&t.waits(&t.c)).await?;
        Ok(())
    });
    all.rule("who waits and falls silent holds up nobody after a release", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        t.queue(&silent(&t)).await?;
        t.queue(&t.waits(&t.c)).await?;
        // Handed over or not: having been alive until now does not give it the key for a whole TTL.
        t.release(&t.a).await?;
        t.hold_in_the_end(&t.waits(&t.c)).await?;
        Ok(())
    });
    all.rule("who waits and falls silent holds up nobody after an expiry", |t| async move {
        t.hold(&Claim { ttl: 2 * SHORT, ..t.tries(&t.a) }).await?;
        if let Claimed::Queued { .. } = t.claim(&silent(&t)).await? {
            t.hold_in_the_end(&t.waits(&t.c)).await?;
        }
        Ok(())
    });
    all.rule("a place that was lost is given back for its ticket", |t| async move {
        t.hold(&t.tries(&t.a)).await?;
        let lost = silent(&t);
        let ticket = t.queue(&lost).await?.ticket;
        t.queue(&t.waits(&t.c)).await?;
        sleep(2 * SHORT).await;
        t.release(&t.a).await?;
        t.hold(&t.waits(&t.c)).await?;
        t.queue(&t.waits(&draw("later")?)).await?;
        let again = t.queue(&Claim { ticket: Some(ticket), ..lost }).await?;
        must!(again, again if again.ahead == 0 && again.ticket == ticket);
        Ok(())
    });
    all.rule("word of a grant is true", |t| async move {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (identity, to) = (Identity::new("b").map_err(|e| Saw(e.to_string()))?, heard.clone());
        t.store.listen(Pushes::new(identity.clone(), move |push| {
            to.lock().unwrap_or_else(PoisonError::into_inner).push(push);
            true
        }));
        let waits = Claim { presence: MIDDLE, ..t.waits(&Owner::draw(&identity)?) };
        t.hold(&t.tries(&t.a)).await?;
        t.queue(&waits).await?;
        t.release(&t.a).await?;
        let held = t.hold(&waits).await?;
        // There may be none, or none yet.
        for push in heard.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            match push {
                Push::Missed | Push::Nothing => {}
                Push::Granted { owner, fence, length } if owner == waits.owner.secret() => {
                    must!((fence, length), (fence, length) if fence == held && length <= MIDDLE);
                }
                other => return Err(Saw(format!("word that was for nobody here: {other:?}"))),
            }
        }
        Ok(())
    });
}

/// `b`, who will not come again.
fn silent<S: Store>(t: &Trial<S>) -> Claim {
    Claim { presence: SHORT, ..t.waits(&t.b) }
}

/// `a` holds, `b` and `c` wait; the largest fence that anybody was told of.
async fn both_wait<S: Store>(t: &Trial<S>) -> Result<u64, Saw> {
    let fence = t.hold(&t.tries(&t.a)).await?;
    let seen = t.queue(&t.waits(&t.b)).await?.seen;
    Ok(fence.max(seen).max(t.queue(&t.waits(&t.c)).await?.seen))
}

/// Nobody jumps the line in which `b` comes first; `b`'s fence.
async fn first_gets_it<S: Store>(t: &Trial<S>) -> Result<u64, Saw> {
    must!(t.claim(&t.tries(&draw("tries")?)).await, Ok(Claimed::Busy { .. }));
    t.queue(&t.waits(&draw("last")?)).await?;
    t.queue(&t.waits(&t.c)).await?;
    t.hold(&t.waits(&t.b)).await
}

/// Values that only the newest fence may write.
pub(super) fn values<S: Store>(all: &mut Rules<S>) {
    all.rule("what was written is read", |t| async move {
        must!(t.store.read(&t.key).await, Ok(None));
        for (fence, value) in (1..).zip([vec![], vec![0, 255, 10, 13, 0], vec![b'x'; 100_000]]) {
            let write = FencedWrite::new(t.key.clone(), value.clone(), fence);
            must!(t.store.write(&write).await, Ok(Wrote::Written));
            let read = must!(t.store.read(&t.key).await, Ok(Some(read)) => read);
            must!(read == value, true);
        }
        Ok(())
    });
    all.rule("no older fence writes after a newer", |t| async move {
        let write = |value: &[u8], fence| FencedWrite::new(t.key.clone(), value.to_vec(), fence);
        // Real fences need all of their digits.
        let newest = 1_764_518_400_123_456;
        for (value, fence) in [(b"1", newest - 1), (b"2", newest), (b"3", newest)] {
            must!(t.store.write(&write(value, fence)).await, Ok(Wrote::Written));
        }
        for stale in [newest - 1, 9, 0] {
            let by = must!(t.store.write(&write(b"stale", stale)).await, Ok(Wrote::Stale { newest }) => newest);
            must!(by, by if by == newest);
        }
        must!(t.store.read(&t.key).await, Ok(Some(value)) if value == b"3");
        must!(t.store.write(&write(b"4", newest + 1)).await, Ok(Wrote::Written));
        must!(t.store.read(&t.key).await, Ok(Some(value)) if value == b"4");
        Ok(())
    });
    all.rule("of many who write at once the newest fence is last", |t| async move {
        let mut writing = JoinSet::new();
        for fence in [5_u64, 9, 2, 16, 11, 3, 14, 8] {
            let (store, value) = (t.store.clone(), fence.to_string().into_bytes());
            let write = FencedWrite::new(t.key.clone(), value, fence);
            writing.spawn(async move { store.write(&write).await });
        }
        writing.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
        must!(t.store.read(&t.key).await, Ok(Some(value)) if value == b"16");
        Ok(())
    });
}
