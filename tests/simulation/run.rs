//! One run: what a seed decides, from the first claim until nothing is left.
use crate::{client::Client, plan::Plan, planted::Planted, server::Data, world::World};
use fastrand::Rng;
use std::{cell::RefCell, collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    runtime::{Builder, Handle},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

thread_local! {
    /// What panicked on this thread, and was not meant to.
    pub static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

pub struct Outcome {
    pub plan: Plan,
    pub violation: Option<String>,
    pub coverage: BTreeMap<&'static str, u64>,
    pub log: Vec<String>,
}

/// Runs one seed.
pub fn run(seed: u64, planted: Option<Planted>, logging: bool) -> Outcome {
    fastrand::seed(seed);
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let world = runtime.block_on(async {
        let mut dice = Rng::with_seed(seed);
        let plan = Plan::draw(planted, &mut dice);
        let world = World::new(plan, dice, logging);
        let whole = timeout(Duration::from_secs(30 * 24 * 3600), scenario(world.clone()));
        tokio::select! {
            biased;
            () = world.failed.notified() => {}
            ended = whole => if ended.is_err() {
                world.broken(|| "the run never ended".into());
            }
        }
        world
    });
    drop(runtime);
    if let Some(panic) = PANICKED.take() {
        world.broken(|| format!("panicked: {panic}"));
    }
    let judge = &mut world.lock().judge;
    Outcome {
        plan: world.plan.clone(),
        violation: judge.violation.take(),
        coverage: std::mem::take(&mut judge.coverage),
        log: judge.log.take().unwrap_or_default(),
    }
}

/// A process.
struct House {
    client: Arc<Client>,
    actors: JoinSet<()>,
}

impl House {
    fn build(world: &Arc<World>) -> House {
        let mut dice = world.lock().dice.fork();
        let ttl = world.plan.base.mul_f64([0.7, 1.0, 2.0][dice.usize(0..3)]);
        let client = Client::new(world, ttl);
        let mut actors = JoinSet::new();
        for _ in 0..world.plan.actors {
            actors.spawn(client.clone().act(dice.fork()));
        }
        House { client, actors }
    }
}

async fn scenario(world: Arc<World>) {
    let wire = tokio::spawn(world.clone().carry());
    let mut houses: Vec<House> = (0..world.plan.clients).map(|_| House::build(&world)).collect();
    // Those who were told to shut down.
    let mut leaving = JoinSet::new();
    let end = Instant::now() + world.plan.length;
    while Instant::now() < end {
        let mut dice = world.lock().dice.fork();
        let fair = world.plan.weather.map_or(world.plan.length, |mean| mean.mul_f64(0.2 + 1.6 * dice.f64()));
        sleep_until(end.min(Instant::now() + fair)).await;
        if Instant::now() < end {
            change(&world, &mut houses, &mut leaving, &mut dice).await;
        }
    }
    world.end();
    let patience = world.plan.base * 40 * (1 + world.plan.clients * world.plan.actors) as u32;
    let drained = timeout(patience, async {
        for house in &mut houses {
            while house.actors.join_next().await.is_some() {}
        }
        while leaving.join_next().await.is_some() {}
    });
    if drained.await.is_err() {
        world.broken(|| "somebody who waited was neither served nor told".into());
    }
    for house in &houses {
        house.client.leases.shutdown().await;
    }
    drop(houses);
    drop(leaving);
    // By now, what was left to a server that did not answer has been freed by its TTL.
    sleep(world.plan.base * 12).await;
    judge_the_end(&world);
    wire.abort();
    let _ = wire.await;
    let alive = Handle::current().metrics().num_alive_tasks();
    if alive > 0 {
        world.broken(|| format!("{alive} tasks are left"));
    }
}

fn judge_the_end(world: &World) {
    let now = world.now();
    let state = &mut *world.lock();
    let wall = state.wall.at(now);
    for key in state.server.keys() {
        let waiting = state.server.waiting(&key, wall);
        if state.server.holder(&key, wall).is_some() || waiting > 0 {
            state.judge.broken(now, format!("{key} is left in the server, with {waiting} in its line"));
        } else if let Some(last) = state.server.last_holder(&key) {
            state.judge.expired(now.saturating_sub(wall - last.until), &key, last.fence);
        }
    }
    state.judge.all_told(now);
    if !state.wire.is_empty() {
        state.judge.broken(now, "something is still on its way".into());
    }
    for (net, trouble) in state.wire.nets.iter().enumerate() {
        // Only an engine that is gone is deaf.
        if trouble.sink.as_ref().is_some_and(|sink| !sink.is_closed()) {
            state.judge.broken(now, format!("the engine of net {net} is left"));
        }
    }
    if state.judge.violation.is_some() {
        world.failed.notify_one();
    }
}

/// The weather changes: something happens to the server, or to one of the clients.
async fn change(world: &Arc<World>, houses: &mut [House], leaving: &mut JoinSet<()>, dice: &mut Rng) {
    let plan = &world.plan;
    let (now, true_time) = (Instant::now(), world.now());
    let long = plan.some(dice, 3.0);
    let at = dice.usize(0..houses.len());
    let net = houses[at].client.net;
    let what = match dice.u32(0..100) {
        0..10 => {
            let state = &mut *world.lock();
            state.wire.drop_all(&mut state.judge);
            state.wire.down = now + long;
            let nets = state.wire.nets.len();
            if dice.bool() {
                (0..nets).for_each(|net| state.wire.missed(net, now + long));
            }
            "server down"
        }
        10..20 => {
            let wire = &mut world.lock().wire;
            wire.hangs = wire.hangs.max(now + long);
            "server hangs"
        }
        20..28 => {
            let ppm = dice.i64(-10_000..=10_000);
            world.lock().wall.set_rate(true_time, ppm);
            "server's clock changes its rate"
        }
        28..38 => {
            world.lock().wire.nets[net].paused = now + long;
            world.lock().judge.nets[net].stalls += 1;
            "client paused"
        }
        38..46 => {
            world.lock().wire.nets[net].parted = now + long;
            "client cut off"
        }
        46..54 => {
            world.lock().wire.nets[net].deaf = now + long;
            "client deaf"
        }
        54..60 => {
            world.suspend(long);
            "machine suspended"
        }
        60..66 => {
            let house = std::mem::replace(&mut houses[at], House::build(world));
            leave(world, house, leaving);
            "client shut down"
        }
        66..74 => {
            let mut house = std::mem::replace(&mut houses[at], House::build(world));
            world.lock().wire.nets[net].cut = true;
            world.lock().judge.nets[net].dead = true;
            house.actors.abort_all();
            "client killed"
        }
        74..83 if plan.loses_data() => {
            restarted(world, Default::default());
            "data lost"
        }
        83..92 if plan.loses_data() => {
            let (old, lag) = (world.lock().server.data.clone(), plan.some(dice, 0.5));
            sleep(lag).await;
            restarted(world, old);
            "last writes lost"
        }
        74..92 if plan.jumps() => {
            let by = plan.some(dice, 3.0).as_micros() as i64 * if dice.bool() { 1 } else { -1 };
            world.lock().wall.jump(true_time, by);
            world.lock().judge.void_all(false);
            "server's clock jumps"
        }
        74..92 if plan.forces() => {
            let key = format!("k{}", dice.usize(0..plan.keys));
            let leases = houses[at].client.leases.clone();
            leaving.spawn(async move {
                // It may fail like everything else.
                let _ = leases.force_release(key).await;
            });
            "force"
        }
        _ => return,
    };
    let judge = &mut world.lock().judge;
    judge.count(what);
    judge.note(true_time, || format!("{what}: net {net}, {long:?}"));
    if what.starts_with("client") {
        judge.nets[net].disturbances += 1;
        judge.nets[net].until = judge.nets[net].until.max(true_time + long.as_micros() as u64);
    } else {
        judge.disturbances += 1;
        judge.until = judge.until.max(true_time + long.as_micros() as u64);
    }
}

/// The server comes back with these data; that takes it a moment.
fn restarted(world: &World, data: Data) {
    let state = &mut *world.lock();
    state.server.data = data;
    state.judge.void_all(true);
    state.wire.drop_all(&mut state.judge);
    state.wire.down = Instant::now() + Duration::from_millis(1);
}

fn leave(world: &Arc<World>, mut house: House, leaving: &mut JoinSet<()>) {
    let world = world.clone();
    leaving.spawn(async move {
        house.client.leases.shutdown().await;
        // Its tasks see that it is over.
        while let Some(ended) = house.actors.join_next().await {
            if let Err(error) = ended {
                world.note(|| format!("{error}"));
            }
        }
    });
}
