//! The runtime's own part of what recording costs an app: a profiler that has the runtime tell all that the shim has it tell, and does nothing with it
//! (`xtask/native/listening.c`). It is in the app from its start and listens when it is told to.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read as _, Write as _},
    path::PathBuf,
    process::Command,
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{exec::output, paths::Paths};

/// Whichever: the library makes its profiler for all.
const CLASS: &str = "{cf0d821e-299b-5307-a3d8-b283c03916de}";
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);

/// The way to the profiler in one app.
pub(super) struct Listener {
    library: PathBuf,
    asks: PathBuf,
    answers: PathBuf,
    to: File,
    from: Receiver<u8>,
}

impl Listener {
    /// Compiles the profiler, and makes the pipes to one in the next app.
    pub(super) fn new(paths: &Paths) -> Result<Listener> {
        let folder = paths.target.join("bench");
        fs::create_dir_all(&folder).context("target/bench: cannot be made")?;
        let library = folder.join("liblistening.so");
        let source = paths.root.join("xtask/native/listening.c");
        output(Command::new("gcc").args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(source))?;
        let pipe = |name: &str| -> Result<(PathBuf, File)> {
            let path = folder.join(name);
            // Of an earlier run, perhaps.
            fs::remove_file(&path).ok();
            output(Command::new("mkfifo").arg(&path))?;
            // For both: nobody waits for the other end to be opened.
            let file = OpenOptions::new().read(true).write(true).open(&path);
            Ok((path.clone(), file.with_context(|| format!("{}: cannot be opened", path.display()))?))
        };
        let (asks, to) = pipe("listening-asks")?;
        let (answers, mut read) = pipe("listening-answers")?;
        let (heard, from) = channel();
        thread::spawn(move || {
            let mut byte = [0];
            while read.read_exact(&mut byte).is_ok() && heard.send(byte[0]).is_ok() {}
        });
        Ok(Listener { library, asks, answers, to, from })
    }

    /// Has the program that this starts load the profiler. Its runtime samples allocations, or else tells of every 100 KB or so.
    pub(super) fn load_into<'a>(&self, command: &'a mut Command, samples: bool) -> &'a mut Command {
        if samples {
            command.env("LISTENING_SAMPLED", "1");
        }
        command
            .env("CORECLR_ENABLE_NOTIFICATION_PROFILERS", "1")
            .env("CORECLR_NOTIFICATION_PROFILERS", format!("{}={CLASS};", self.library.display()))
            .env("LISTENING_ASKS", &self.asks)
            .env("LISTENING_ANSWERS", &self.answers)
    }

    /// Has it listen, or no more; done when this returns.
    pub(super) fn listen(&mut self, listens: bool) -> Result<()> {
        self.to.write_all(if listens { b"1" } else { b"0" }).context("asking the profiler in the app")?;
        match self.from.recv_timeout(ANSWER_DEADLINE).context("the profiler in the app does not answer")? {
            b'+' => Ok(()),
            _ => bail!("the runtime refuses the session of the profiler in the app"),
        }
    }
}
