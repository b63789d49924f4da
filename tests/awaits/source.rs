//! What the source offers that is async, so that the table cannot fall behind.
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// `Type::function` for each public function that is async or gives out a future. Those of the `Store` trait are left
/// out: they are the seam below, where a caller has to give back what it took.
pub fn public_async_calls() -> BTreeSet<String> {
    let mut sources = Vec::new();
    gather(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut sources);
    let sources: Vec<String> = sources.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let futures: Vec<String> = sources.iter().flat_map(|source| types_that_are_futures(source)).collect();
    sources.iter().flat_map(|source| calls(source, &futures)).collect()
}

fn gather(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            gather(&path, into);
        } else if path.extension().is_some_and(|end| end == "rs") {
            into.push(path);
        }
    }
}

/// `impl Future for This`
fn types_that_are_futures(source: &str) -> Vec<String> {
    let impls = source.lines().filter(|line| line.starts_with("impl") && line.contains("Future for "));
    impls.filter_map(|line| Some(name(line.split("Future for ").nth(1)?))).collect()
}

fn calls(source: &str, futures: &[String]) -> Vec<String> {
    let (mut of, mut found) = (String::new(), Vec::new());
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("impl") {
            let whole = line.split(" for ").last().unwrap_or(line);
            let whole = whole.strip_prefix("impl").map_or(whole, after_generics);
            of = name(whole.trim_start());
        }
        if !line.starts_with(' ') && line.starts_with("pub ") {
            of = String::new();
        }
        let Some(at) = line.trim_start().strip_prefix("pub ") else { continue };
        let is_async = at.starts_with("async fn ");
        let Some((_, rest)) = at.split_once("fn ") else { continue };
        let mut signature = rest.to_owned();
        while !signature.ends_with('{') && !signature.ends_with(';') && !signature.ends_with('}') {
            let Some(more) = lines.next() else { break };
            signature.push_str(more);
        }
        let gives = signature.split("where").next().and_then(|s| s.rsplit_once("-> ")).map_or("", |(_, gives)| gives);
        let future = gives.contains("Future") || futures.iter().any(|future| name(gives) == *future);
        if is_async || future {
            let function = name(rest);
            found.push(if of.is_empty() { function } else { format!("{of}::{function}") });
        }
    }
    found
}

fn after_generics(rest: &str) -> &str {
    let mut depth = 0;
    for (at, c) in rest.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            ' ' if depth == 0 => return &rest[at..],
            _ => {}
        }
    }
    rest
}

fn name(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

#[test]
fn a_new_async_call_would_be_noticed_in_whatever_form_it_comes() {
    let source = "
impl<T: Clone> Thing<T> {
    pub async fn one(&self) {}
    pub(crate) async fn not_public(&self) {}
    pub fn two<K, F>(
        &self,
        key: K,
    ) -> impl Future<Output = Result<F::Output>> + use<K, F>
    where
        F: Future,
    {
    }
    pub fn three(&self) -> Guard<F> {}
    pub fn not_async(&self, given: impl Future<Output = ()>) -> u32 {}
}
impl<F: Future> Future for Guard<F> {}
impl fmt::Debug for Other {}
impl Other {
    pub fn four(self) -> Pin<Box<dyn Future<Output = ()> + Send>> {}
}
pub async fn five() {}
";
    let futures = types_that_are_futures(source);
    assert_eq!(futures, ["Guard"]);
    assert_eq!(calls(source, &futures), ["Thing::one", "Thing::two", "Thing::three", "Other::four", "five"]);
}
