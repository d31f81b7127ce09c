//! Servers of symbols that answer, lie, hang and send too much: stand-ins on loopback.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use perfusion::symbols::{FetchLimits, FetchReport, SymbolCache, SymbolServers};
use perfusion_model::text::hex;
use perfusion_symbolize::separate;
use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What a stand-in does when it is asked for a path.
#[derive(Clone)]
enum Answer {
    File(Vec<u8>),
    Status(&'static str),
    To(String),
    /// Takes the request and says nothing until it is closed.
    Nothing,
    /// Says the beginning of an answer, and nothing more.
    Begins,
    /// Zeros without an end.
    Endless,
}

/// A server, and the paths that it was asked for.
struct StandIn {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl StandIn {
    /// Answers these paths; others are not there.
    fn new(answers: impl Fn(&str) -> HashMap<String, Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (answers, asked) = (answers(&url), Arc::<Mutex<Vec<String>>>::default());
        let paths = Arc::clone(&asked);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (answers, paths) = (answers.clone(), Arc::clone(&paths));
                std::thread::spawn(move || serve(stream, &answers, &paths));
            }
        });
        Self { url, asked }
    }

    fn with(path: String, answer: Answer) -> Self {
        Self::new(|_| HashMap::from([(path.clone(), answer.clone())]))
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(mut stream: TcpStream, answers: &HashMap<String, Answer>, paths: &Mutex<Vec<String>>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let Some(Ok(first)) = lines.next() else { return };
    while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    paths.lock().unwrap().push(path.clone());
    let answer = answers.get(&path).cloned().unwrap_or(Answer::Status("404 Not Found"));
    // The client may have gone: that is its affair.
    match answer {
        Answer::File(bytes) => {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", bytes.len());
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&bytes)).ok();
        }
        Answer::Status(status) => {
            stream
                .write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes())
                .ok();
        }
        Answer::To(location) => {
            let head =
                format!("HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n");
            stream.write_all(head.as_bytes()).ok();
        }
        Answer::Nothing | Answer::Begins => {
            if matches!(answer, Answer::Begins) {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n\x7fELF").ok();
            }
            // Until the client has closed it.
            std::io::copy(&mut stream, &mut std::io::sink()).ok();
        }
        Answer::Endless => {
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").ok();
            while stream.write_all(&[0; 4096]).is_ok() {}
        }
    }
}

/// A debug file and its build id.
fn debug_file(number: u32) -> (Vec<u8>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(of("a.c"), format!("int main(void) {{ return {number}; }}")).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        assert!(Command::new(program).args(arguments).status().unwrap().success());
    };
    run("gcc", &["-Wl,--build-id", "-o", &of("a"), &of("a.c")]);
    run("objcopy", &["--only-keep-debug", &of("a"), &of("a.debug")]);
    let report = separate::report(of("a").as_ref(), &[]).unwrap();
    (std::fs::read(of("a.debug")).unwrap(), report.build_id.unwrap())
}

fn debuginfod(build_id: &[u8]) -> String {
    format!("/buildid/{}/debuginfo", hex(build_id))
}

fn store(build_id: &[u8]) -> String {
    format!("/_.debug/elf-buildid-sym-{}/_.debug", hex(build_id))
}

const LIMITS: FetchLimits =
    FetchLimits { file_bytes: 1 << 20, timeout: Duration::from_millis(700) };

struct Fetched {
    report: FetchReport,
    cache: SymbolCache,
    folder: TempDir,
}

fn fetch(urls: &[&str], build_ids: &[&[u8]]) -> Fetched {
    let folder = tempfile::tempdir().unwrap();
    let cache = SymbolCache::open(&folder.path().join("symbols"), 1 << 20).unwrap();
    let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
    let mut servers = SymbolServers::new(&urls, cache.clone(), LIMITS).unwrap();
    let build_ids: Vec<Vec<u8>> = build_ids.iter().map(|id| id.to_vec()).collect();
    let report = servers.fetch(&build_ids, Instant::now() + Duration::from_secs(60));
    Fetched { report, cache, folder }
}

#[test]
fn both_kinds_of_servers_are_asked_and_redirects_followed() {
    let (bytes, id) = debug_file(1);
    let file = Answer::File(bytes.clone());
    let plain = StandIn::with(debuginfod(&id), file.clone());
    let microsoft = StandIn::with(store(&id), file.clone());
    let below = StandIn::with(format!("/download/symbols{}", store(&id)), file.clone());
    let elsewhere = StandIn::with("/blob/1?sig=a%2Fb".to_owned(), file.clone());
    let away = format!("{}/blob/1?sig=a%2Fb", elsewhere.url);
    let sends_away = StandIn::with(store(&id), Answer::To(away));
    let moves = StandIn::new(|_| {
        HashMap::from([
            (debuginfod(&id), Answer::To("/moved".to_owned())),
            ("/moved".to_owned(), file.clone()),
        ])
    });
    for url in [
        plain.url.clone(),
        format!("{}/", plain.url),
        microsoft.url,
        format!("{}/download/symbols", below.url),
        sends_away.url,
        moves.url,
    ] {
        let fetched = fetch(&[&url], &[&id]);
        let report = &fetched.report;
        assert_eq!(report.kept.concat(), id, "{url}: {:?}", report.causes);
        assert_eq!(fetched.report.bytes, bytes.len() as u64);
        let path = fetched.cache.path(&id).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        let directory = fetched.folder.path().join("symbols");
        assert_eq!(separate::by_build_id(&id, &[directory]), Some(path));
    }
    assert_eq!(plain.asked(), [debuginfod(&id), debuginfod(&id)]);
}

#[test]
fn a_file_of_another_build_is_refused_and_the_next_server_asked() {
    let ((bytes, id), (other, _)) = (debug_file(1), debug_file(2));
    let liar = StandIn::with(debuginfod(&id), Answer::File(other));
    let fetched = fetch(&[&liar.url], &[&id]);
    assert_eq!((fetched.report.refused, fetched.report.kept.len()), (1, 0));
    assert!(fetched.report.causes.iter().any(|cause| cause.contains("another build id")));
    assert!(!fetched.cache.path(&id).unwrap().exists());
    let honest = StandIn::with(debuginfod(&id), Answer::File(bytes));
    let fetched = fetch(&[&liar.url, &honest.url], &[&id]);
    assert_eq!(fetched.report.kept.concat(), id);
}

#[test]
fn a_server_that_hangs_costs_a_bounded_time_once() {
    let ((bytes, id), (_, second)) = (debug_file(1), debug_file(2));
    for hang in [Answer::Nothing, Answer::Begins] {
        let hangs = StandIn::with(debuginfod(&id), hang);
        let began = Instant::now();
        let fetched = fetch(&[&hangs.url], &[&id, &second]);
        assert!(began.elapsed() < 3 * LIMITS.timeout, "{:?}", began.elapsed());
        assert_eq!((fetched.report.failed, fetched.report.causes.len()), (2, 1));
        assert_eq!(hangs.asked(), [debuginfod(&id)], "then it is left alone");
        let left = std::fs::read_dir(fetched.folder.path().join("symbols")).unwrap().count();
        assert_eq!(left, 0, "nothing is left of what it sent");
    }
    // Another one is asked for the next file.
    let (hangs, good) = (
        StandIn::with(debuginfod(&second), Answer::Nothing),
        StandIn::with(debuginfod(&id), Answer::File(bytes)),
    );
    let fetched = fetch(&[&hangs.url, &good.url], &[&second, &id]);
    assert_eq!((fetched.report.kept.concat(), fetched.report.failed), (id, 1));
}

#[test]
fn a_server_without_an_end_is_cut_off() {
    let (_, id) = debug_file(1);
    let endless = StandIn::with(debuginfod(&id), Answer::Endless);
    let fetched = fetch(&[&endless.url], &[&id]);
    assert_eq!(fetched.report.refused, 1);
    assert!(fetched.report.causes.iter().any(|cause| cause.contains("longer than the limit")));
}

#[test]
fn what_no_server_has_and_what_servers_answer_wrongly_is_told_apart() {
    let (_, id) = debug_file(1);
    let empty = StandIn::new(|_| HashMap::new());
    let fetched = fetch(&[&empty.url], &[&id]);
    assert_eq!((fetched.report.not_found, fetched.report.causes.len()), (1, 0));
    assert_eq!(empty.asked(), [debuginfod(&id), store(&id)]);
    assert_eq!(fetched.report.lines(), ["symbols: 1 not on any server"]);
    let broken = StandIn::with(debuginfod(&id), Answer::Status("500 Internal Server Error"));
    let fetched = fetch(&[&broken.url], &[&id]);
    assert_eq!(fetched.report.failed, 1);
    assert!(fetched.report.causes.iter().any(|cause| cause.contains("answered 500")));
    let circle = StandIn::with(debuginfod(&id), Answer::To(debuginfod(&id)));
    assert_eq!(fetch(&[&circle.url], &[&id]).report.failed, 1);
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert_eq!(fetch(&[&format!("http://{gone}")], &[&id]).report.failed, 1);
    assert!(fetch(&["http://127.0.0.1:1"], &[]).report.lines().is_empty());
}

#[test]
fn urls_that_are_none_are_refused() {
    for url in ["", "ftp://a/", "a", "http://"] {
        assert!(SymbolServers::check(url).is_err(), "{url}");
    }
    SymbolServers::check("https://msdl.microsoft.com/download/symbols").unwrap();
}
