//! A server that does as it is told: for what a real one does once in a year.
use super::server::Connection;
use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, Mutex},
};

/// What it answers to a list of operations, or that it hangs up instead.
pub enum Say {
    /// The server's time in microseconds, and for each operation its answer in words.
    Answers(u64, Vec<Vec<String>>),
    /// An error for the whole list, but only when the next list has come.
    ErrorAfterNext(&'static str),
    /// Nothing, and no more.
    HangUp,
}

/// A listener, and every list that came: the words of an EVALSHA or EVAL that names keys.
pub struct Fake {
    port: u16,
    heard: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Fake {
    /// `script` is given how many lists came before and the words of the next one. Lists without operations, which
    /// open a connection, are answered with the time 1,000 s.
    pub fn start(script: impl Fn(usize, &[String]) -> Say + Send + Sync + 'static) -> Fake {
        Self::with_info(None, script)
    }

    /// One that says this of itself.
    pub fn with_info(
        info: Option<&'static str>,
        script: impl Fn(usize, &[String]) -> Say + Send + Sync + 'static,
    ) -> Fake {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (script, heard) = (Arc::new(script), Arc::new(Mutex::new(vec![])));
        let fake = Fake { port, heard: heard.clone() };
        // These threads end with their connections, the first one with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, heard) = (script.clone(), heard.clone());
                let connection = Connection::over(stream.unwrap()).unwrap();
                std::thread::spawn(move || serve(connection, info, &*script, &heard));
            }
        });
        fake
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Every list so far.
    pub fn heard(&self) -> Vec<Vec<String>> {
        self.heard.lock().unwrap().clone()
    }
}

fn serve(
    mut connection: Connection,
    info: Option<&str>,
    script: &dyn Fn(usize, &[String]) -> Say,
    heard: &Mutex<Vec<Vec<String>>>,
) {
    let mut withheld = None;
    while let Ok(command) = connection.read() {
        let words: Vec<String> = command.list().into_iter().map(|w| w.text().unwrap()).collect();
        if !words[0].starts_with("EVAL") {
            match (words[0].as_str(), info) {
                ("PING", _) => connection.write("+PONG\r\n"),
                ("INFO", Some(info)) => connection.write(&format!("${}\r\n{info}\r\n", info.len())),
                _ => connection.write("-ERR not here\r\n"),
            }
            continue;
        }
        let say = if words[2] == "0" {
            Say::Answers(1_000_000_000, vec![])
        } else {
            let mut heard = heard.lock().unwrap();
            heard.push(words.clone());
            script(heard.len() - 1, &words)
        };
        if let Some(text) = withheld.take() {
            connection.write(&format!("-{text}\r\n"));
        }
        match say {
            Say::HangUp => return,
            Say::ErrorAfterNext(text) => withheld = Some(text),
            Say::Answers(time, answers) => {
                let bulk = |word: &String| format!("${}\r\n{word}\r\n", word.len());
                let list = |items: Vec<String>| format!("*{}\r\n{}", items.len(), items.concat());
                let answers = answers.iter().map(|a| list(a.iter().map(bulk).collect()));
                connection.write(&list(std::iter::once(bulk(&time.to_string())).chain(answers).collect()));
            }
        }
    }
}
