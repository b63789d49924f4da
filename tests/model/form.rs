//! The form of a state: without what can have no more effect, and the same for all that differ in names only.
use crate::{
    client::{Client, Phase},
    fault::Fault,
    server::Owner,
    world::{Bounds, Exchange, LATE, Message, State, What},
};

impl State {
    pub(crate) fn settle(&mut self, x: &Exchange) {
        let State { server, clients, net, .. } = self;
        let runs =
            |message: &&Message| message.what == What::Claim && (message.age < LATE || x.fault == Fault::LateClaimRuns);
        let coming: Vec<Owner> = net.iter().filter(runs).map(|message| message.owner).collect();
        net.retain(|&Message { what, owner, fence, age }| {
            let client = &clients[usize::from(owner.client)];
            let phase = if client.owner == owner { client.phase } else { Phase::Gone };
            let (waits, holds) = (phase == Phase::Waiting, phase == Phase::Held);
            match what {
                // A late one finds out that its owner holds the key, and nothing else.
                What::Claim => waits || coming.contains(&owner) || server.owns(owner) || server.in_line(owner),
                // Not much, unless a fault lets it.
                What::Renew => holds || server.owns(owner) || x.fault != Fault::None,
                What::Release => true,
                What::Held | What::Granted => waits,
                What::Queued => waits || holds && x.fault == Fault::QueuedWhileHeldIsLoss,
                What::Renewed => holds && (age + client.valid < x.ttl(owner) || x.fault == Fault::DeadlineFromTheReply),
                What::Lost => holds,
                What::Forced => waits || holds && client.fence == fence,
            }
        });
        self.rank();
        for (one, other) in [(0, 1), (1, 2), (0, 1)] {
            if x.bounds.alike(one.into(), other.into())
                && self.clients[usize::from(one)] > self.clients[usize::from(other)]
            {
                self.swap(one, other);
            }
        }
        self.net.sort_unstable();
    }

    /// Of the fences, only the order counts.
    fn rank(&mut self) {
        let mut fences: Vec<&mut u8> = vec![&mut self.server.f, &mut self.server.us];
        fences.extend(self.server.k.as_mut().map(|k| &mut k.fence));
        fences.extend(self.robbed.as_mut().map(|k| &mut k.fence));
        for Client { fence, over, .. } in &mut self.clients {
            fences.extend([fence, over]);
        }
        fences.extend(self.net.iter_mut().map(|message| &mut message.fence));
        let used = fences.iter().fold(1_u32, |used, fence| used | 1 << **fence);
        for fence in fences {
            *fence = (0..*fence).filter(|smaller| used & 1 << smaller != 0).map(|_| 1).sum();
        }
    }

    /// Two clients change their names.
    fn swap(&mut self, one: u8, other: u8) {
        let State { server, clients, net, robbed, .. } = self;
        clients.swap(usize::from(one), usize::from(other));
        let owners = server.k.iter_mut().chain(robbed).map(|k| &mut k.owner);
        let owners = owners.chain(server.q.iter_mut().map(|waiter| &mut waiter.owner));
        let owners = owners.chain(net.iter_mut().map(|message| &mut message.owner));
        for owner in owners.chain(clients.iter_mut().map(|client| &mut client.owner)) {
            let named = &mut owner.client;
            *named = if *named == one {
                other
            } else if *named == other {
                one
            } else {
                *named
            };
        }
    }
}

impl Bounds {
    fn alike(&self, one: usize, other: usize) -> bool {
        let terms = |this: usize| {
            (self.ttl[this], self.presence[this], self.claims[this], self.renewals[this], self.acquisitions[this])
        };
        terms(one) == terms(other)
    }
}
