//! What leasehold says, written down.
use super::server::Server;
use std::{
    fmt::{self, Write},
    sync::{Arc, LazyLock, Mutex},
};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::DefaultGuard,
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
};

/// A line for each event and each span.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<(Level, String)>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push((*event.metadata().level(), line.0));
    }
    fn on_new_span(&self, span: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        let mut line = Line(format!("span {}", span.metadata().name()));
        span.record(&mut line);
        self.0.lock().unwrap().push((*span.metadata().level(), line.0));
    }
}

impl Log {
    /// Of this thread, until the guard is dropped.
    pub fn listen() -> (Log, DefaultGuard) {
        let log = Log::default();
        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(log.clone()));
        (log, guard)
    }

    /// Of every thread, of every test in this process.
    pub fn of_all() -> &'static Log {
        static LOG: LazyLock<Log> = LazyLock::new(|| {
            let log = Log::default();
            tracing::subscriber::set_global_default(tracing_subscriber::registry().with(log.clone())).unwrap();
            log
        });
        &LOG
    }

    pub fn lines(&self) -> Vec<(Level, String)> {
        self.0.lock().unwrap().clone()
    }

    pub fn count(&self, level: Level, text: &str) -> usize {
        self.lines().iter().filter(|(l, line)| *l == level && line.contains(text)).count()
    }

    /// Said exactly once, at this level.
    #[track_caller]
    pub fn assert_once(&self, level: Level, text: &str) {
        assert_eq!(self.count(level, text), 1, "{text}: {:#?}", self.lines());
    }

    /// How many warnings there were that say this of this server.
    pub fn warnings(&self, server: &Server, text: &str) -> usize {
        let port = format!("127.0.0.1:{}", server.port());
        let said = self.lines();
        said.iter().filter(|(level, line)| *level == Level::WARN && line.contains(&port) && line.contains(text)).count()
    }
}
