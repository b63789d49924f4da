//! The form of a state: without what can have no more effect, and the same for all that differ in names only.
use crate::{
    client::{Client, Phase},
    fault::Fault,
    member::{Fence, NO_FENCE, Owner},
    world::{Answer, MEMBERS, Quorum, Site, State, What},
};

impl State {
    pub(crate) fn settle(&mut self, x: &Quorum) {
        for site in &mut self.sites {
            site.settle(&self.clients, x);
        }
        for client in self.clients.iter_mut().filter(|client| client.phase == Phase::Held) {
            client.forced = false;
        }
        if x.bounds.pace > 0 {
            self.rank();
        }
        if self.clients[0] > self.clients[1] {
            self.swap();
        }
        self.sites.sort_unstable();
    }

    /// Of the fences that no clock makes any more, only the order counts.
    fn rank(&mut self) {
        let State { clients, sites, told, .. } = self;
        let mut old: Vec<&mut Fence> = fences(clients, sites, told).filter(|fence| **fence < 0).collect();
        let mut values: Vec<Fence> = old.iter().map(|fence| **fence).collect();
        values.sort_unstable();
        values.dedup();
        for fence in &mut old {
            let larger = values.iter().filter(|value| **value > **fence).count();
            **fence = -1 - Fence::try_from(larger).unwrap();
        }
    }

    /// The clients change their names.
    fn swap(&mut self) {
        let State { clients, sites, .. } = self;
        clients.swap(0, 1);
        let mut owners: Vec<&mut Owner> = clients.iter_mut().map(|client| &mut client.owner).collect();
        for Site { member, answers, coming, robbed, .. } in sites {
            answers.swap(0, 1);
            owners.extend(member.k.iter_mut().chain(robbed).map(|k| &mut k.owner));
            owners.extend(coming.iter_mut().map(|request| &mut request.owner));
        }
        for owner in owners {
            owner.client = 1 - owner.client;
        }
        self.sites.iter_mut().for_each(|site| site.coming.sort_unstable());
    }
}

impl Site {
    fn settle(&mut self, clients: &[Client; 2], x: &Quorum) {
        let (k, coming) = (self.member.k, self.coming.clone());
        // The key is this owner's, or may yet be.
        let may_own = |owner: Owner| {
            k.is_some_and(|k| k.owner == owner) || coming.iter().any(|it| it.owner == owner && it.runs(x.fault))
        };
        self.coming.retain(|request| {
            let client = &clients[usize::from(request.owner.client)];
            let awaited = client.owner == request.owner
                && match request.what {
                    What::Hold { round: 0, .. } => {
                        x.fault == Fault::HoldKeepsWhatIsNotOurs && client.phase == Phase::Confirming
                    }
                    What::Hold { round, .. } => client.renewing && client.round == round,
                    _ => false,
                };
            awaited
                || may_own(request.owner)
                || request.what == What::Release && x.fault == Fault::ReleaseComparesNothing
        });
        self.coming.sort_unstable();
        self.coming.dedup();
        let lives = |owner: Owner| clients.iter().any(|client| client.owner == owner && client.phase != Phase::Gone);
        self.robbed = self.robbed.filter(|k| lives(k.owner));
    }
}

/// All fences that there are.
pub(crate) fn fences<'a>(
    clients: &'a mut [Client; 2],
    sites: &'a mut [Site; MEMBERS],
    told: &'a mut Fence,
) -> impl Iterator<Item = &'a mut Fence> {
    let of_clients = clients.iter_mut().filter(|client| matches!(client.phase, Phase::Confirming | Phase::Held));
    let of_sites = sites.iter_mut().flat_map(|Site { member, answers, coming, robbed, .. }| {
        let leases = member.k.iter_mut().chain(robbed).map(|k| &mut k.fence);
        let answers = answers.iter_mut().filter_map(|answer| match answer {
            Answer::Proposed(fence) => Some(fence),
            _ => None,
        });
        let requests = coming.iter_mut().filter_map(|request| match &mut request.what {
            What::Hold { fence, .. } => Some(fence),
            _ => None,
        });
        leases.chain(answers).chain(requests).chain([&mut member.f])
    });
    let all = of_clients.map(|client| &mut client.fence).chain(of_sites).chain([told]);
    all.filter(|fence| **fence != NO_FENCE)
}
