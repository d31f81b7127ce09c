//! The runtime's own part of what recording costs an app: a profiler that has the runtime tell all
//! that the shim has it tell, and does nothing with it (`xtask/native/listening.c`). It is in the
//! app from its start and listens when it is told to.

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

use super::native;
use crate::{exec::output, paths::WorkspacePaths};

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
    pub(super) fn new(paths: &WorkspacePaths) -> Result<Listener> {
        let library = native::library(paths, "listening")?;
        let pipe = |name: &str| -> Result<(PathBuf, File)> {
            let path = paths.target.join("bench").join(name);
            // Of an earlier run, perhaps.
            fs::remove_file(&path).ok();
            output(Command::new("mkfifo").arg(&path))?;
            // For both: nobody waits for the other end to be opened.
            let file = OpenOptions::new().read(true).write(true).open(&path);
            Ok((
                path.clone(),
                file.with_context(|| format!("{}: cannot be opened", path.display()))?,
            ))
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

    /// Has the program that this starts on such a runtime load the profiler.
    pub(super) fn load_into<'a>(&self, command: &'a mut Command, runtime: &str) -> &'a mut Command {
        if runtime == "10" {
            command.env("LISTENING_SAMPLED", "1");
        }
        command
            .env("CORECLR_ENABLE_NOTIFICATION_PROFILERS", "1")
            .env(
                "CORECLR_NOTIFICATION_PROFILERS",
                format!("{}={};", self.library.display(), native::CLASS),
            )
            .env("LISTENING_ASKS", &self.asks)
            .env("LISTENING_ANSWERS", &self.answers)
    }

    /// Has it listen, or no more; done when this returns.
    pub(super) fn listen(&mut self, listens: bool) -> Result<()> {
        self.to
            .write_all(if listens { b"1" } else { b"0" })
            .context("asking the profiler in the app")?;
        match self
            .from
            .recv_timeout(ANSWER_DEADLINE)
            .context("the profiler in the app does not answer")?
        {
            b'+' => Ok(()),
            _ => bail!("the runtime refuses the session of the profiler in the app"),
        }
    }
}
