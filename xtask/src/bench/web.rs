//! The Kestrel app that is put under load, `xtask/csharp/Web.cs`, and its clients: connections that
//! each have one request on its way.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, bail};

use super::{listening::Listener, load::App};
use crate::{exec::output, paths::WorkspacePaths};

/// The one that ASP.NET is there for.
const RUNTIME: &str = "9";
const CONNECTIONS: usize = 16;
/// More than the app answers.
const MOST_ANSWER_BYTES: u64 = 64 << 10;

/// Its clients; dropping them ends them.
pub(super) struct Clients {
    enough: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

/// The compiled app, for the runtime that has ASP.NET.
fn dll(paths: &WorkspacePaths) -> PathBuf {
    paths.target.join("bench/web.dll")
}

/// The app, with all its clients connected, who ask for so many orders each.
pub(super) fn start(
    paths: &WorkspacePaths,
    orders: u32,
    listener: &Listener,
) -> Result<(App, Clients)> {
    let source = paths.root.join("xtask/csharp/Web.cs");
    output(Command::new(paths.csc()).args(["--framework", "aspnet"]).arg(dll(paths)).arg(source))?;
    let mut app = App::begin(
        listener.load_into(Command::new(paths.dotnet(RUNTIME)).arg(dll(paths)), RUNTIME),
    )?;
    let line = app.line()?;
    let port: u16 = line
        .trim()
        .parse()
        .with_context(|| format!("the web app: expected a port, found {line:?}"))?;
    let enough = Arc::new(AtomicBool::new(false));
    let mut clients = Clients { enough: Arc::clone(&enough), threads: Vec::new() };
    for _ in 0..CONNECTIONS {
        let connection =
            TcpStream::connect(("127.0.0.1", port)).context("connecting to the web app")?;
        connection.set_nodelay(true).context("TCP_NODELAY")?;
        let enough = Arc::clone(&enough);
        clients.threads.push(thread::spawn(move || ask(connection, orders, &enough)));
    }
    Ok((app, clients))
}

/// Asks again and again.
fn ask(mut connection: TcpStream, orders: u32, enough: &AtomicBool) -> Result<()> {
    let request = format!("GET /{orders} HTTP/1.1\r\nHost: shop\r\n\r\n");
    let mut answers = BufReader::new(connection.try_clone().context("a second handle")?);
    // Pairs with the store when the clients end; nothing else is handed over.
    while !enough.load(Ordering::Relaxed) {
        connection.write_all(request.as_bytes()).context("asking the web app")?;
        let mut length = None;
        let mut line = String::new();
        loop {
            line.clear();
            let mut limited = answers.by_ref().take(MOST_ANSWER_BYTES);
            if limited.read_line(&mut line).context("the web app's answer")? == 0 {
                bail!("the web app has closed a connection");
            }
            if line == "\r\n" {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse::<u64>().ok();
            }
        }
        let length = length
            .filter(|length| *length <= MOST_ANSWER_BYTES)
            .context("an answer without its length")?;
        std::io::copy(&mut answers.by_ref().take(length), &mut std::io::sink())
            .context("the web app's answer")?;
    }
    Ok(())
}

impl Clients {
    /// Ends them. Fails if one has failed meanwhile: the load was less than said then.
    pub(super) fn end(mut self) -> Result<()> {
        self.enough.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(result) => result?,
                Err(_) => bail!("a client of the web app has panicked"),
            }
        }
        Ok(())
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
    }
}
