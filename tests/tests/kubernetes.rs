//! Pods from the API server: they name services, label samples, and are chosen or opt out by what
//! they say of themselves. Here the server's part is played by a small server of the test, with
//! answers from `fixtures/kubernetes`; against the server itself `cargo xtask apiserver` runs the
//! tests that are ignored, and with PERFUSION_RECORD_ANSWERS=FOLDER keeps its answers.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use serde_json::{Value, json};
use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{
    Need, RECORD, RECORD_NET9, Runtime, begin, begin_beside, cgroup2, sources,
};
use system_tests::perfusion;
use system_tests::profile::Profile;
use system_tests::wait::wait_until;

use crate::node::{DEADLINE, Node, free_port, group, spin};

/// Ids of containers in the recorded pods.
const WEB_CONTAINER: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const SHY_CONTAINER: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
const TOKEN: &str = "the-token";

/// The cgroups of a pod and one of its containers, as systemd names them.
struct PodGroup {
    container: Group,
    _pod: Group,
}

impl PodGroup {
    fn new(uid: &str, container: &str) -> std::io::Result<Self> {
        let pod = format!("kubepods-pod{}.slice", uid.replace('-', "_"));
        let scope = format!("{pod}/cri-containerd-{container}.scope");
        // Of a run that was killed.
        fs::remove_dir(cgroup2().unwrap_or_default().join(&scope)).ok();
        let group = Group::new(&pod)?;
        Ok(Self { container: Group::new(&scope)?, _pod: group })
    }

    fn take(&self, app: &App) {
        self.container.take(app.pid()).unwrap();
    }
}

/// An answer of the API server, written after its documents (one that it gave:
/// `PERFUSION_RECORD_ANSWERS`).
fn recorded(name: &str) -> String {
    fs::read_to_string(sources().join("fixtures/kubernetes").join(name)).unwrap()
}

fn uid(pod: &Value) -> String {
    pod["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Gives recorded answers to whoever has the token.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Served>>);

#[derive(Default)]
struct Served {
    watches: Vec<TcpStream>,
    requests: Vec<String>,
}

impl Server {
    fn listen(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                server.answer(stream);
            }
        });
        port
    }

    fn answer(&self, mut stream: TcpStream) {
        let lines: Vec<String> = BufReader::new(&stream)
            .lines()
            .map_while(Result::ok)
            .take_while(|line| !line.is_empty())
            .collect();
        // One that hung up before it asked.
        let Some(request) =
            lines.first().and_then(|line| line.split(' ').nth(1)).map(str::to_owned)
        else {
            return;
        };
        let allowed = lines
            .iter()
            .any(|line| line.eq_ignore_ascii_case(&format!("authorization: bearer {TOKEN}")));
        let mut served = self.0.lock().unwrap();
        served.requests.push(request.clone());
        let json = "content-type: application/json\r\nconnection: close\r\n";
        let (status, body) = if !allowed {
            ("401 Unauthorized", recorded("unauthorized.json"))
        } else if !request.starts_with("/api/v1/pods?")
            || !request.contains("fieldSelector=spec.nodeName%3Dnode-1")
        {
            ("404 Not Found", String::new())
        } else if request.contains("watch=1") {
            let head = format!("HTTP/1.1 200 OK\r\n{json}transfer-encoding: chunked\r\n\r\n");
            if stream.write_all(head.as_bytes()).is_ok() {
                served.watches.push(stream);
            }
            return;
        } else {
            ("200 OK", recorded("list.json"))
        };
        write!(stream, "HTTP/1.1 {status}\r\n{json}content-length: {}\r\n\r\n{body}", body.len())
            .ok();
    }

    /// Tells whoever watches.
    fn say(&self, event: &Value) {
        let line = format!("{event}\n");
        for stream in &mut self.0.lock().unwrap().watches {
            // One that went away is told nothing.
            write!(stream, "{:x}\r\n{line}\r\n", line.len()).ok();
        }
    }

    /// Breaks the connections of whoever watches.
    fn hang_up(&self) {
        self.0.lock().unwrap().watches.clear();
    }

    /// The version that the last watch goes on from.
    fn asked_from(&self) -> Option<String> {
        let served = self.0.lock().unwrap();
        let last = served.requests.iter().rfind(|request| request.contains("watch=1"))?;
        Some(last.rsplit_once("resourceVersion=")?.1.to_owned())
    }

    fn watches(&self) -> usize {
        self.0.lock().unwrap().requests.iter().filter(|request| request.contains("watch=1")).count()
    }

    fn lists(&self) -> usize {
        self.0
            .lock()
            .unwrap()
            .requests
            .iter()
            .filter(|request| !request.contains("watch=1"))
            .count()
    }
}

/// The configuration of a daemon that asks a server for the pods of node-1.
fn configuration(node: &Node, url: &str, more: &str) -> String {
    format!(
        "kubernetes: {{pods: api, node: node-1, url: {url:?}, token_file: {:?}, ca_file: {:?}, \
         labels: [team]}}\n\
         limits: {{{}}}\n{more}",
        node.scratch.path("token"),
        node.scratch.path("ca.crt"),
        node.kill_switch()
    )
}

fn has_shim(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps"))
        .is_ok_and(|maps| maps.contains("perfusion-shim"))
}

fn of_pid(profile: &Profile, pid: u32) -> usize {
    profile.samples.iter().filter(|sample| sample.label("pid") == pid.to_string()).count()
}

/// Waits until so many windows more are over.
pub(crate) fn windows(node: &Node, more: f64) {
    let before = node.metric("perfusion_daemon_windows_total");
    wait_until("windows", DEADLINE, || {
        (node.metric("perfusion_daemon_windows_total") >= before + more).then_some(())
    })
    .unwrap();
}

/// Samples of a process in windows that begin from now on, of which two are waited for. (By their
/// times: files of windows before may come late.)
fn samples_from_now(node: &Node, pid: u32) -> usize {
    // What is on its way is over then.
    windows(node, 2.0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_nanos()).unwrap();
    windows(node, 3.0);
    let profiles = node.profiles();
    profiles
        .iter()
        .filter(|(_, profile)| profile.time_ns >= now)
        .map(|(_, profile)| of_pid(profile, pid))
        .sum()
}

/// A `strace` of all by which a process can be reached from outside, with the paths of descriptors.
fn tracer(output: &Path) -> Command {
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "--seccomp-bpf", "-qq", "-s", "200", "-o"]).arg(output).arg("-e");
    command.arg("trace=%file,connect,openat2,process_vm_readv,process_vm_writev,ptrace");
    command
}

/// How a process was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// By a path below its directory in /proc.
    Path,
    /// From a descriptor of that directory, or of what is below it.
    Descriptor,
    /// By its runtime's socket.
    Socket,
    Memory,
    Trace,
}

/// What of a process's directory is the process itself; the rest is what the kernel counts of it
/// and tells everybody.
const INSIDE: [&str; 12] = [
    "auxv",
    "cmdline",
    "cwd",
    "environ",
    "exe",
    "fd",
    "fdinfo",
    "map_files",
    "maps",
    "mem",
    "root",
    "smaps",
];

/// True when so much of a path below a process's directory leads into it.
fn is_inside(place: &str) -> bool {
    let mut names = place.split('/').filter(|name| !name.is_empty()).peekable();
    // Of its threads it is the same.
    if names.next_if_eq(&"task").is_some() {
        names.next();
    }
    names.next().is_some_and(|name| INSIDE.contains(&name))
}

/// How often `pid` was reached in which way, by what [`tracer`] wrote.
fn ways<'a>(traced: impl Iterator<Item = &'a str>, pid: u32) -> BTreeMap<Way, usize> {
    let (directory, socket) = (format!("/proc/{pid}"), format!("dotnet-diagnostic-{pid}-"));
    // `/proc/12` is no part of `/proc/123`.
    let below = |path: &str| {
        path.strip_prefix(&directory)
            .filter(|rest| rest.is_empty() || rest.starts_with('/'))
            .map(str::to_owned)
    };
    let mut found = BTreeMap::new();
    for line in traced {
        let mut see = |way| *found.entry(way).or_default() += 1;
        // "path", and 12</path/of/descriptor>, "path from there".
        if line.split('"').skip(1).step_by(2).filter_map(below).any(|place| is_inside(&place)) {
            see(Way::Path);
        }
        let by_descriptor = line.split('<').skip(1).filter_map(|rest| {
            let (path, then) = rest.split_once('>')?;
            let from_there = then.strip_prefix(", \"").and_then(|then| then.split('"').next());
            Some(format!("{}/{}", below(path)?, from_there.unwrap_or_default()))
        });
        if { by_descriptor }.any(|place| is_inside(&place)) {
            see(Way::Descriptor);
        }
        if line.contains(&socket) {
            see(Way::Socket);
        }
        if line.contains(&format!("process_vm_readv({pid}, "))
            || line.contains(&format!("process_vm_writev({pid}, "))
        {
            see(Way::Memory);
        }
        if line.contains("ptrace(") && line.contains(&format!(", {pid},")) {
            see(Way::Trace);
        }
    }
    found
}

#[test]
fn a_trace_tells_each_way_into_a_process() {
    let of = |line: &str| ways(line.lines(), 12).into_keys().collect::<Vec<_>>();
    assert_eq!(
        of(r#"7 openat(AT_FDCWD</>, "/proc/12/task/13/mem", O_RDONLY) = 5</proc/12/task/13/mem>"#),
        [Way::Path, Way::Descriptor]
    );
    assert_eq!(of(r#"7 openat(4</proc/12>, "maps", O_RDONLY <unfinished ...>"#), [Way::Descriptor]);
    assert_eq!(
        of(r#"7 openat2(4</proc/12/root>, "tmp", {flags=O_PATH}, 24) = 5</tmp>"#),
        [Way::Descriptor]
    );
    assert_eq!(
        of("7 connect(4<socket:[9]>, {sa_family=AF_UNIX, \
            sun_path=\"/tmp/dotnet-diagnostic-12-1-socket\"}, 110) = 0"),
        [Way::Socket]
    );
    for harmless in [
        r#"7 openat(AT_FDCWD</>, "/proc/123/mem", O_RDONLY) = 5</proc/123/mem>"#,
        r#"7 openat(AT_FDCWD</>, "/proc/12/stat", O_RDONLY) = 5</proc/12/stat>"#,
        "7 openat(AT_FDCWD</>, \"/proc/12/task/12/syscall\", O_RDONLY) = \
            5</proc/12/task/12/syscall>",
        r#"7 openat(AT_FDCWD</>, "/proc/12", O_RDONLY|O_DIRECTORY) = 4</proc/12>"#,
    ] {
        assert_eq!(of(harmless), [], "{harmless}");
    }
}

#[test]
fn pods_name_services_label_samples_and_opt_out_without_being_touched() {
    let programs = [Need::C, Need::Cgroup2, Need::Program("strace"), Need::Program("python3")];
    let needs = [RECORD_NET9, &programs].concat();
    let Some(_turn) = begin_beside("kubernetes: recorded", &needs) else { return };
    let list: Value = serde_json::from_str(&recorded("list.json")).unwrap();
    let pod = |name: &str| {
        let all = list["items"].as_array().unwrap();
        all.iter().find(|pod| pod["metadata"]["name"] == name).unwrap().clone()
    };
    let (web, shy) = (pod("web-1"), pod("shy-1"));
    let Ok(web_group) = PodGroup::new(&uid(&web), WEB_CONTAINER) else {
        panic!("no cgroup can be made")
    };
    let shy_group = PodGroup::new(&uid(&shy), SHY_CONTAINER).unwrap();
    // Nobody has told of this one: it may be one that opts out.
    let strange_group =
        PodGroup::new("99999999-2222-3333-4444-555555555555", &"c".repeat(64)).unwrap();
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap();
    let (mut web_app, mut shy_app, strange) = (app.spawn().unwrap(), app.spawn().unwrap(), spin());
    for app in [&mut web_app, &mut shy_app] {
        app.await_ready().unwrap();
    }
    web_group.take(&web_app);
    shy_group.take(&shy_app);
    strange_group.take(&strange);

    let mut node = Node::new();
    let server = Server::default();
    let url = format!("http://127.0.0.1:{}", server.listen());
    fs::write(node.scratch.path("token"), "not-the-token\n").unwrap();
    let selection = "selection: {only: [{namespace: shop}, {cgroup: \
                     /kubepods-pod99999999_*}]}\nattach: \
         {policy: all}\n";
    node.configure(&configuration(&node, &url, selection));
    let trace = node.scratch.path("trace");
    let mut command = tracer(&trace);
    command.arg("-D").arg(perfusion::command([""; 0]).get_program());
    node.run(command.args(["daemon", "--config"]).arg(node.scratch.path("perfusion.yaml")));

    // Without the right token nothing is known. Tokens are renewed: the file is read for each
    // request.
    wait_until("the refusal to be said", DEADLINE, || {
        node.daemon().progress().contains("answers 401: Unauthorized").then_some(())
    })
    .unwrap();
    fs::write(node.scratch.path("token"), TOKEN).unwrap();

    let profile = wait_until("a profile of the pod's application with names", DEADLINE, || {
        let named =
            |profile: &Profile| profile.functions().iter().any(|name| name.contains("CallHeavy"));
        node.profiles()
            .into_iter()
            .rfind(|(service, profile)| service == "web-shop" && named(profile))
    });
    let (_, profile) = profile
        .unwrap_or_else(|error| panic!("{error}\n{}\n{:?}", node.daemon().progress(), node.pids()));
    let sample =
        profile.samples.iter().find(|sample| sample.label("pid") == web_app.pid().to_string());
    let label = |name: &str| sample.unwrap().label(name);
    assert_eq!(label("k8s.namespace.name"), "shop");
    assert_eq!(label("k8s.pod.name"), "web-1");
    assert_eq!(label("k8s.pod.uid"), uid(&web));
    assert_eq!(label("k8s.container.name"), "main");
    assert_eq!(label("k8s.pod.label.team"), "payments");
    assert_eq!(label("container_id"), WEB_CONTAINER);
    assert_eq!(node.metric("perfusion_pods"), 2.0);
    wait_until("a shim", DEADLINE, || has_shim(web_app.pid()).then_some(())).unwrap();

    // The others were neither recorded nor touched, and the trace would have shown it: it shows
    // each way of the daemon into the one that may be touched, and the ways the daemon does not go
    // of a program that goes them. What is not counted is the look of every daemon, as it begins,
    // into everybody's directories for temporary files, where one that crashed may have left its
    // library: by a thread of its own, which is known by its look at the kernel's.
    let traced = fs::read_to_string(&trace).unwrap();
    let sweeps = |line: &&str| line.contains("</proc/2>, \"environ\"");
    let sweeper = traced.lines().find(sweeps).and_then(|line| line.split(' ').next());
    let by_sweeper = |line: &&str| line.split(' ').next() == sweeper;
    let touched = |pid: u32| ways(traced.lines().filter(|line| !by_sweeper(line)), pid);
    let of_web = touched(web_app.pid());
    for way in [Way::Path, Way::Descriptor, Way::Socket] {
        assert!(of_web.contains_key(&way), "the trace does not show what it should: {of_web:?}");
    }
    let control = node.scratch.path("control");
    let memory = "import ctypes, sys\nlibc = ctypes.CDLL(None)\npid = int(sys.argv[1])\n\
                  libc.process_vm_readv(pid, None, 0, None, 0, 0)\nlibc.ptrace(3, pid, None, None)";
    let mut command = tracer(&control);
    assert!(
        command
            .args(["python3", "-c", memory, &web_app.pid().to_string()])
            .status()
            .unwrap()
            .success()
    );
    let of_control = ways(fs::read_to_string(&control).unwrap().lines(), web_app.pid());
    assert_eq!(
        of_control,
        BTreeMap::from([(Way::Memory, 1), (Way::Trace, 1)]),
        "the trace is blind"
    );
    for app in [&shy_app, &strange] {
        let pid = app.pid().to_string();
        let picture =
            || traced.lines().filter(|line| line.contains(&pid)).collect::<Vec<_>>().join("\n");
        assert_eq!(touched(app.pid()), BTreeMap::new(), "{}", picture());
        // Of its environment TMPDIR, and the directory that names, and /tmp or /dev/shm, below its
        // root.
        let swept = ways(traced.lines().filter(by_sweeper), app.pid());
        assert!(swept.keys().all(|way| *way == Way::Descriptor), "{swept:?}: {}", picture());
        assert!(swept.values().sum::<usize>() <= 4, "{swept:?}: {}", picture());
        assert!(!has_shim(app.pid()) && !node.pids().contains(&app.pid()));
    }

    // The pods change their minds.
    let event = |kind: &str, pod: &Value, version: &str, out: bool| {
        let mut pod = pod.clone();
        pod["metadata"]["resourceVersion"] = version.into();
        pod["metadata"]["annotations"] =
            if out { json!({"perfusion/profile": "off"}) } else { json!({}) };
        json!({"type": kind, "object": pod})
    };
    server.say(&event("MODIFIED", &web, "70001", true));
    wait_until("the shim to leave", DEADLINE, || (!has_shim(web_app.pid())).then_some(())).unwrap();
    // The shim may leave before the probes are told.
    wait_until("windows without it", DEADLINE, || {
        (samples_from_now(&node, web_app.pid()) == 0).then_some(())
    })
    .unwrap();
    server.say(&event("MODIFIED", &shy, "70002", false));
    wait_until("the other to be attached to and recorded", DEADLINE, || {
        (has_shim(shy_app.pid()) && node.pids().contains(&shy_app.pid())).then_some(())
    })
    .unwrap();

    // A connection that breaks goes on where it was; one that is too late asks for all again.
    let before = server.watches();
    server.hang_up();
    wait_until("another watch", DEADLINE, || (server.watches() > before).then_some(())).unwrap();
    assert_eq!(server.asked_from().as_deref(), Some("70002"));
    let lists = server.lists();
    server.say(&serde_json::from_str(&recorded("gone.json")).unwrap());
    wait_until("all pods to be asked for again", DEADLINE, || {
        (server.lists() > lists).then_some(())
    })
    .unwrap();
    wait_until("a watch after that", DEADLINE, || (server.watches() > before + 1).then_some(()))
        .unwrap();
    server.say(&event("DELETED", &web, "70010", false));
    wait_until("one to be gone", DEADLINE, || (node.metric("perfusion_pods") == 1.0).then_some(()))
        .unwrap();
    drop((web_app, shy_app, strange));
    node.end();
}

#[test]
fn rules_know_all_cgroups_of_the_host_when_the_daemon_is_in_a_container() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2, Need::Program("unshare")]].concat();
    let Some(_turn) = begin_beside("kubernetes: cgroup namespace", &needs) else { return };
    let (uid, other) =
        ("11111111-2222-3333-4444-555555555555", "11111111-2222-3333-4444-666666666666");
    let own = group("perfusion-test-own").unwrap();
    let wanted = PodGroup::new(uid, WEB_CONTAINER).unwrap();
    let unwanted = PodGroup::new(other, SHY_CONTAINER).unwrap();
    let (inside, outside) = (spin(), spin());
    wanted.take(&inside);
    unwanted.take(&outside);
    let mut node = Node::new();
    let logs = node.scratch.path("pods");
    fs::create_dir_all(logs.join(format!("shop_web-1_{uid}"))).unwrap();
    fs::create_dir_all(logs.join(format!("bank_vault-1_{other}"))).unwrap();
    node.configure(&format!(
        "kubernetes: {{pod_logs: {logs:?}}}\nselection: {{only: [{{namespace: shop}}]}}\nlimits: \
         {{{}}}\n",
        node.kill_switch()
    ));
    let script = "echo $$ > \"$0/cgroup.procs\" && mount=$1 && shift && export mount && \
                  exec unshare --cgroup --mount sh -c 'umount \"$mount\" && mount -t cgroup2 none \
         \"$mount\" && exec \"$0\" \"$@\"' \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(own.path()).arg(cgroup2().unwrap());
    command.arg(perfusion::command([""; 0]).get_program()).args(["daemon", "--config"]);
    node.run(command.arg(node.scratch.path("perfusion.yaml")));
    // It sees its own cgroup as the top: this test would say nothing otherwise.
    let seen = fs::read_to_string(format!("/proc/{}/cgroup", node.daemon().pid())).unwrap();
    assert!(seen.contains(own.path().file_name().unwrap().to_str().unwrap()), "{seen}");
    let own_view = |path: &Path| {
        let seen = PathBuf::from(format!("/proc/{}/root", node.daemon().pid()));
        seen.join(cgroup2().unwrap().strip_prefix("/").unwrap()).join(path).exists()
    };
    assert!(!own_view(Path::new(wanted.container.path().parent().unwrap().file_name().unwrap())));
    let profile = wait_until("the pod's profile", DEADLINE, || {
        let of = |profile: &Profile| of_pid(profile, inside.pid()) > 0;
        node.profiles().into_iter().rfind(|(_, profile)| of(profile))
    });
    let (_, profile) =
        profile.unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert!(profile.samples.iter().all(|sample| sample.label("k8s.pod.name") == "web-1"));
    windows(&node, 3.0);
    assert_eq!(node.pids().into_iter().collect::<Vec<_>>(), [inside.pid()]);
    drop((inside, outside));
    node.end();
}

/// A real API server with its store, and nothing else of a cluster: no controller, no kubelet.
struct Cluster {
    folder: PathBuf,
    port: u16,
    store: u16,
    etcd: Background,
    server: Option<Background>,
}

struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn background(command: &mut Command, log: &Path) -> Background {
    let log = fs::File::create(log).unwrap();
    Background(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap())
}

/// Who may do everything.
const ADMIN: &str = "of-the-administrator";

impl Cluster {
    fn start(folder: &Path) -> Self {
        let (port, store, peers) = (free_port(), free_port(), free_port());
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let mut etcd =
            Command::new(std::env::var("PERFUSION_ETCD").expect("PERFUSION_ETCD names no program"));
        etcd.arg("--data-dir").arg(folder.join("store"));
        etcd.args(["--listen-client-urls", &url(store), "--advertise-client-urls", &url(store)]);
        etcd.args([
            "--listen-peer-urls",
            &url(peers),
            "--initial-advertise-peer-urls",
            &url(peers),
        ]);
        etcd.args(["--initial-cluster", &format!("default={}", url(peers))]);
        let etcd = background(&mut etcd, &folder.join("etcd.log"));
        fs::write(folder.join("tokens"), format!("{ADMIN},admin,admin,\"system:masters\"\n"))
            .unwrap();
        let key = Command::new("openssl")
            .args(["genrsa", "-out"])
            .arg(folder.join("key"))
            .arg("2048")
            .output();
        assert!(key.unwrap().status.success());
        let mut cluster = Self { folder: folder.to_owned(), port, store, etcd, server: None };
        cluster.serve();
        cluster
    }

    /// Starts the API server, anew where it ran.
    fn serve(&mut self) {
        drop(self.server.take());
        let mut server = Command::new(
            std::env::var("PERFUSION_APISERVER").expect("PERFUSION_APISERVER names no program"),
        );
        let file = |name: &str| self.folder.join(name).display().to_string();
        server.args([
            format!("--etcd-servers=http://127.0.0.1:{}", self.store),
            format!("--secure-port={}", self.port),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--cert-dir={}", file("certificates")),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-key-file={}", file("key")),
            format!("--service-account-signing-key-file={}", file("key")),
            format!("--token-auth-file={}", file("tokens")),
            "--authorization-mode=RBAC".to_owned(),
            "--allow-privileged=true".to_owned(),
            // Pods of this test have no service account.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
        ]);
        self.server = Some(background(&mut server, &self.folder.join("server.log")));
        wait_until("the API server", 2 * DEADLINE, || {
            let (status, _) = self.ask(ADMIN, "GET", "/readyz", None)?;
            (status == 200).then_some(())
        })
        .unwrap_or_else(|error| {
            panic!("{error}\n{}", fs::read_to_string(self.folder.join("server.log")).unwrap())
        });
    }

    fn authority(&self) -> PathBuf {
        self.folder.join("certificates/apiserver.crt")
    }

    /// Status and text of an answer; nothing when there is none.
    fn ask(
        &self,
        token: &str,
        method: &str,
        path: &str,
        body: Option<(&str, &str)>,
    ) -> Option<(u16, String)> {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--max-time",
            "20",
            "--write-out",
            "\n%{http_code}",
        ]);
        curl.arg("--cacert").arg(self.authority()).args(["--request", method]);
        curl.args(["--header", &format!("authorization: Bearer {token}")]);
        if let Some((kind, body)) = body {
            curl.args(["--header", &format!("content-type: {kind}"), "--data-binary", body]);
        }
        let output = curl.arg(format!("https://127.0.0.1:{}{path}", self.port)).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let (text, status) = text.rsplit_once('\n')?;
        let status = status.parse().ok().filter(|status| *status != 0)?;
        Some((status, text.to_owned()))
    }

    /// What the administrator is answered.
    fn does(&self, method: &str, path: &str, body: &Value) -> Value {
        let kind =
            if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let text = body.to_string();
        let (status, answer) = self.ask(ADMIN, method, path, Some((kind, &text))).unwrap();
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        serde_json::from_str(&answer).unwrap()
    }

    /// A pod whose container runs, as a kubelet would tell.
    fn pod(
        &self,
        node: &str,
        name: &str,
        container: &str,
        labels: &Value,
        annotations: &Value,
    ) -> String {
        let made = self.does(
            "POST",
            "/api/v1/namespaces/shop/pods",
            &json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": name, "labels": labels, "annotations": annotations},
                "spec": {"nodeName": node, "containers": [{"name": "main", "image": "shop:1"}]},
            }),
        );
        self.does(
            "PATCH",
            &format!("/api/v1/namespaces/shop/pods/{name}/status"),
            &json!({"status": {"phase": "Running", "containerStatuses": [{
                "name": "main", "image": "shop:1", "imageID": "sha256:0", "ready": true,
                "restartCount": 0,
                "containerID": format!("containerd://{container}"), "state": {"running": {}},
            }]}}),
        );
        uid(&made)
    }

    fn annotate(&self, pod: &str, value: &Value) {
        let patch = json!({"metadata": {"annotations": {"perfusion/profile": value}}});
        self.does("PATCH", &format!("/api/v1/namespaces/shop/pods/{pod}"), &patch);
    }

    fn helm(&self, arguments: &[&str]) -> Command {
        let server = format!("https://127.0.0.1:{}", self.port);
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c",
            "cluster": {"server": server, "certificate-authority": self.authority()}}],
            "users": [{"name": "u", "user": {"token": ADMIN}}],
            "contexts": [{"name": "c",
            "context": {"cluster": "c", "user": "u", "namespace": "perfusion"}}],
        });
        fs::write(self.folder.join("kubeconfig"), kubeconfig.to_string()).unwrap();
        let mut helm =
            Command::new(std::env::var("PERFUSION_HELM").expect("PERFUSION_HELM names no program"));
        helm.env("KUBECONFIG", self.folder.join("kubeconfig"))
            .env("HOME", &self.folder)
            .args(arguments);
        helm
    }
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn chart() -> PathBuf {
    sources().parent().unwrap().join("helm")
}

/// Where objects of this kind are made.
fn place_of(object: &str) -> Option<&'static str> {
    let kind = object.lines().find_map(|line| line.strip_prefix("kind: "))?;
    Some(match kind {
        "CustomResourceDefinition" => "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        "ConfigMap" => "/api/v1/namespaces/perfusion/configmaps",
        "ServiceAccount" => "/api/v1/namespaces/perfusion/serviceaccounts",
        "DaemonSet" => "/apis/apps/v1/namespaces/perfusion/daemonsets",
        "NetworkPolicy" => "/apis/networking.k8s.io/v1/namespaces/perfusion/networkpolicies",
        "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        "PodMonitor" => "/apis/monitoring.coreos.com/v1/namespaces/perfusion/podmonitors",
        "SecurityContextConstraints" => "/apis/security.openshift.io/v1/securitycontextconstraints",
        other => panic!("a new kind, {other}: say where it is made"),
    })
}

#[test]
#[ignore = "needs an API server: cargo xtask apiserver"]
fn a_real_api_server_takes_the_chart_and_its_pods_are_profiled() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2, Need::Program("curl")]].concat();
    let Some(_turn) = begin("kubernetes: API server", &needs) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(folder.path());
    for name in ["perfusion", "shop"] {
        cluster.does("POST", "/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    }

    // Kinds that others bring, by their own definitions, which this server holds objects against
    // from then on.
    for variable in ["PERFUSION_POD_MONITORS", "PERFUSION_CONSTRAINTS"] {
        let path =
            std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names no definition"));
        let definition = fs::read_to_string(&path).unwrap();
        let place = place_of(&definition).unwrap();
        let (status, answer) =
            cluster.ask(ADMIN, "POST", place, Some(("application/yaml", &definition))).unwrap();
        assert_eq!(status, 201, "{path}: {answer}");
        let made: Value = serde_json::from_str(&answer).unwrap();
        let place = format!("{place}/{}", made["metadata"]["name"].as_str().unwrap());
        wait_until("the kind to be there", DEADLINE, || {
            let (_, answer) = cluster.ask(ADMIN, "GET", &place, None)?;
            let told: Value = serde_json::from_str(&answer).ok()?;
            let conditions = told["status"]["conditions"].as_array()?;
            conditions
                .iter()
                .any(|condition| {
                    condition["type"] == "Established" && condition["status"] == "True"
                })
                .then_some(())
        })
        .unwrap();
    }

    // What the chart renders, object by object, strictly: no field is unknown, none has a wrong
    // value.
    let (mut taken, mut kinds) = (0, String::new());
    for entry in fs::read_dir(chart().join("rendered")).unwrap() {
        let path = entry.unwrap().path();
        for object in fs::read_to_string(&path).unwrap().split("---\n") {
            let Some(place) = place_of(object) else { continue };
            let place = format!("{place}?dryRun=All&fieldValidation=Strict");
            let (status, answer) =
                cluster.ask(ADMIN, "POST", &place, Some(("application/yaml", object))).unwrap();
            assert_eq!(status, 201, "{}: {answer}", path.display());
            taken += 1;
            kinds.extend(object.lines().filter(|line| line.starts_with("kind: ")));
        }
    }
    assert!(taken >= 30, "{taken}");
    for kind in ["PodMonitor", "SecurityContextConstraints"] {
        assert!(kinds.contains(kind), "{kind} is in no scenario");
    }
    let broken = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndate: {}\n";
    let place = format!("{}?dryRun=All&fieldValidation=Strict", place_of(broken).unwrap());
    let (status, answer) =
        cluster.ask(ADMIN, "POST", &place, Some(("application/yaml", broken))).unwrap();
    assert_eq!((status, answer.contains("unknown field")), (400, true), "{answer}");

    // And by helm, with each scenario's values; then for good.
    for scenario in fs::read_dir(chart().join("ci")).unwrap() {
        let mut helm = cluster.helm(&["install", "perfusion", "--dry-run=server", "--values"]);
        succeed(helm.arg(scenario.unwrap().path()).arg(chart()));
    }
    succeed(cluster.helm(&["install", "perfusion"]).arg(chart()));
    let mut upgrade = cluster.helm(&["upgrade", "perfusion", "--values"]);
    succeed(upgrade.arg(chart().join("ci/everything.yaml")).arg(chart()));

    // The service account may do what the daemon needs, and nothing else.
    let request =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let token = cluster.does(
        "POST",
        "/api/v1/namespaces/perfusion/serviceaccounts/perfusion/token",
        &request,
    );
    let token = token["status"]["token"].as_str().unwrap().to_owned();
    let may = |path: &str| cluster.ask(&token, "GET", path, None).unwrap().0;
    assert_eq!(may("/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1"), 200);
    for path in [
        "/api/v1/secrets",
        "/api/v1/nodes",
        "/api/v1/namespaces/shop/pods/web-1",
        "/api/v1/configmaps",
    ] {
        assert_eq!(may(path), 403, "{path}");
    }

    let none = json!({});
    let labels = json!({"app.kubernetes.io/name": "web-shop", "team": "payments"});
    let web_uid = cluster.pod("node-1", "web-1", WEB_CONTAINER, &labels, &none);
    let shy_uid = cluster.pod(
        "node-1",
        "shy-1",
        SHY_CONTAINER,
        &json!({"app": "shy"}),
        &json!({"perfusion/profile": "off"}),
    );
    cluster.pod("node-2", "far-1", &"d".repeat(64), &labels, &none);
    let (web_group, shy_group) = (
        PodGroup::new(&web_uid, WEB_CONTAINER).unwrap(),
        PodGroup::new(&shy_uid, SHY_CONTAINER).unwrap(),
    );
    let (web, shy) = (spin(), spin());
    web_group.take(&web);
    shy_group.take(&shy);
    let mut node = Node::new();
    fs::write(node.scratch.path("token"), &token).unwrap();
    fs::copy(cluster.authority(), node.scratch.path("ca.crt")).unwrap();
    // Not the whole host: a daemon built for tests falls behind on a busy one, and changes would
    // show when it has caught up.
    let selection = "selection: {only: [{namespace: shop}]}\n";
    node.configure(&configuration(
        &node,
        &format!("https://127.0.0.1:{}", cluster.port),
        selection,
    ));
    node.start();
    let profile = wait_until("the pod's profile", DEADLINE, || {
        node.profiles()
            .into_iter()
            .rfind(|(service, profile)| service == "web-shop" && of_pid(profile, web.pid()) > 0)
    });
    let (_, profile) =
        profile.unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    for sample in &profile.samples {
        assert_eq!(sample.label("k8s.pod.name"), "web-1");
        assert_eq!(sample.label("k8s.container.name"), "main");
        assert_eq!(sample.label("k8s.pod.label.team"), "payments");
    }
    assert_eq!(node.metric("perfusion_pods"), 2.0, "of this node only");
    assert!(!node.pids().contains(&shy.pid()));

    // Changes are heard of, also those made while the API server was away; what was known stays
    // known meanwhile.
    cluster.annotate("shy-1", &Value::Null);
    let has = |pid: u32| node.pids().contains(&pid).then_some(());
    wait_until("the one that opts in", DEADLINE, || has(shy.pid())).unwrap_or_else(|error| {
        let told = node
            .get("/metrics")
            .lines()
            .filter(|line| line.contains("_pod"))
            .collect::<Vec<_>>()
            .join("\n");
        panic!("{error}\n{told}\n{}", node.daemon().progress())
    });
    let failures = node.metric("perfusion_daemon_pod_failures_total");
    drop(cluster.server.take());
    wait_until("the failure to be counted", DEADLINE, || {
        (node.metric("perfusion_daemon_pod_failures_total") > failures).then_some(())
    })
    .unwrap();
    assert!(samples_from_now(&node, web.pid()) > 0 && node.metric("perfusion_pods") == 2.0);
    cluster.serve();
    cluster.annotate("web-1", &json!("off"));
    wait_until("the one that opts out to be heard of", 2 * DEADLINE, || {
        (samples_from_now(&node, web.pid()) == 0).then_some(())
    })
    .unwrap();
    cluster.annotate("web-1", &Value::Null);
    record_answers(&cluster);
    cluster.does("DELETE", "/api/v1/namespaces/shop/pods/web-1", &json!({"gracePeriodSeconds": 0}));
    wait_until("one to be gone", DEADLINE, || (node.metric("perfusion_pods") == 1.0).then_some(()))
        .unwrap();

    succeed(&mut cluster.helm(&["uninstall", "perfusion"]));
    let left = [
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "/apis/apps/v1/daemonsets",
        "/api/v1/serviceaccounts",
    ];
    for path in left {
        let (_, text) = cluster.ask(ADMIN, "GET", path, None).unwrap();
        assert!(
            !text.contains("\"perfusion-perfusion\"") && !text.contains("\"name\":\"perfusion\""),
            "{path}: {text}"
        );
    }
    drop((web, shy));
    node.end();
    drop(cluster.etcd);
}

/// Keeps what the other tests play, where it is asked for.
fn record_answers(cluster: &Cluster) {
    let Some(folder) = std::env::var_os("PERFUSION_RECORD_ANSWERS").map(PathBuf::from) else {
        return;
    };
    cluster.annotate("shy-1", &json!("off"));
    let list = "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1&limit=100&resourceVersion=0";
    let keep = |name: &str, token: &str, path: &str| {
        let (_, text) = cluster.ask(token, "GET", path, None).unwrap();
        fs::write(folder.join(name), text).unwrap();
    };
    keep("list.json", ADMIN, list);
    keep("unauthorized.json", "nobody", list);
    // What changed since the first version is forgotten by a server that has just been started.
    keep("gone.json", ADMIN, "/api/v1/pods?watch=1&timeoutSeconds=1&resourceVersion=1");
}
