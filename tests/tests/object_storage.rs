//! The daemon's profiles as objects of a store that speaks S3's protocol and checks its signatures:
//! s3s, with a directory for its objects.

use std::collections::BTreeMap;
use std::path::Path;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use system_tests::Workload;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::perfusion::{Recording, SLACK, Scratch, command};
use system_tests::wait::wait_until;

const KEY_ID: &str = "perfusion";
const SECRET: &str = "not/so+secret";

/// Serves the directories below `root` as buckets at `port`, for ever.
fn serve(root: &Path, listener: std::net::TcpListener) {
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
    builder.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
    let service = builder.build().into_shared();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            listener.set_nonblocking(true).unwrap();
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = service.clone();
                tokio::spawn(async move {
                    let server = Builder::new(TokioExecutor::new());
                    // Who hung up comes again.
                    server.serve_connection(TokioIo::new(stream), service).await.ok();
                });
            }
        });
    });
}

/// Names below a folder and what is there, folders in between as part of the name.
fn files(root: &Path, prefix: &str) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for found in std::fs::read_dir(root).into_iter().flatten().map_while(Result::ok) {
        let name = format!("{prefix}{}", found.file_name().to_string_lossy());
        if found.path().is_dir() {
            all.extend(files(&found.path(), &format!("{name}/")));
        } else if name.ends_with(".pb.gz") {
            all.insert(name, std::fs::read(found.path()).unwrap());
        }
    }
    all
}

#[test]
fn a_store_has_every_file_as_an_object_also_those_of_the_time_it_was_away() {
    let Some(_turn) = begin_beside("object storage", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let [config, folder, store, key_id, secret] =
        ["perfusion.yaml", "files", "store", "key-id", "secret"].map(|name| scratch.path(name));
    std::fs::create_dir_all(store.join("profiles")).unwrap();
    std::fs::write(&key_id, KEY_ID).unwrap();
    // Another one than the store's, until somebody notices.
    std::fs::write(&secret, "outdated").unwrap();
    // Nobody listens there yet.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let text = format!(
        "windows: {{ length: 1s, aligned: false }}\nfiles: \
         {{ directory: {folder:?}, keep_free: 0B }}\n\
         s3:\n  - {{ endpoint: \"http://127.0.0.1:{port}\", bucket: profiles, prefix: a/b, \
         key_id_file: {key_id:?}, secret_file: {secret:?} }}\n\
         selection: {{ only: [{{ command: spin }}] }}\nspool: \
         {{ directory: {:?}, keep_free: 0B }}\ntelemetry: {{ listen: null }}\nlimits: \
         {{ kill_switch: {:?} }}\n",
        scratch.path("spool"),
        scratch.path("run/off"),
    );
    std::fs::write(&config, text).unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let daemon = Recording::spawn(command(["daemon", "--config"]).arg(&config)).unwrap();
    let told = |what: &'static str| {
        wait_until(what, SLACK, || daemon.progress().contains(what).then_some(()))
            .unwrap_or_else(|error| panic!("{error}: {}", daemon.progress()));
    };
    told("it waits in the spool");
    serve(&store, std::net::TcpListener::bind(("127.0.0.1", port)).unwrap());
    std::fs::write(&secret, SECRET).unwrap();
    told("sending profiles works again");
    let bucket = store.join("profiles");
    // Each is there as soon as it was taken; the folder's are there first.
    wait_until("some windows as objects", SLACK, || (files(&bucket, "").len() > 4).then_some(()))
        .unwrap();
    daemon.signal(rustix::process::Signal::TERM).unwrap();
    let outcome = daemon.finish_well(SLACK).unwrap();
    drop(app);
    let (objects, files) = (files(&bucket, ""), files(&folder, ""));
    let names: Vec<&String> = objects.keys().collect();
    // A `spin` of a test beside this one may have another name as a service.
    assert!(names.iter().all(|name| name.starts_with("a/b/")), "{names:?}");
    assert!(names.iter().any(|name| name.starts_with("a/b/spin/")), "{names:?}");
    // Of `a/b/SERVICE/NODE/TIME` without what the files have not.
    let same_names: BTreeMap<String, Vec<u8>> = objects
        .iter()
        .map(|(name, body)| {
            let parts: Vec<&str> = name.split('/').collect();
            assert_eq!(parts.len(), 5, "{name}");
            (format!("{}/{}", parts[2], parts[4]), body.clone())
        })
        .collect();
    assert!(
        same_names == files,
        "{names:?}, {:?}: {}",
        files.keys().collect::<Vec<_>>(),
        outcome.stderr
    );
}
