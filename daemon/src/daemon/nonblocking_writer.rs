//! The way of the log's lines to stderr. Whoever reads there may be slow, stalled or gone, and its
//! disk full: nothing of that is to hold the daemon up or end it. So lines wait in a queue for a
//! thread of their own; what finds no room in it, or cannot be written, is lost and counted.

use perfusion_host::priority;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Lines that wait take so many bytes at most.
const MOST_BYTES: usize = 256 << 10;

/// Takes lines, one with each write, and never fails or waits.
#[derive(Clone, Default)]
pub(super) struct NonblockingWriter(Arc<SharedLineQueue>);

#[derive(Default)]
struct SharedLineQueue {
    queue: Mutex<LineQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct LineQueue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// There is a thread, or was meant to be.
    begun: bool,
    /// A line is being written.
    writing: bool,
    /// The last one was not.
    failing: bool,
    /// Lines lost since [`NonblockingWriter::lost`] and [`NonblockingWriter::unsaid`] told of them.
    lost: u64,
    unsaid: u64,
}

impl LineQueue {
    fn lose_line(&mut self) {
        self.lost += 1;
        self.unsaid += 1;
    }

    fn is_done(&self) -> bool {
        self.lines.is_empty() && !self.writing
    }
}

impl NonblockingWriter {
    /// Starts the thread that writes, the first time.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn begin(&self, mut to: impl Write + Send + 'static) -> io::Result<()> {
        if std::mem::replace(&mut self.lock().begun, true) {
            return Ok(());
        }
        let writer = self.clone();
        let write = move || {
            priority::wait_for_others();
            loop {
                let line = writer.next();
                let written = to.write_all(&line).and_then(|()| to.flush());
                writer.written(written.is_ok());
            }
        };
        std::thread::Builder::new().name("log".into()).spawn(write).map(drop)
    }

    /// Waits until all lines are written or lost, but not longer than this.
    pub(super) fn flush(&self, at_most: Duration) {
        // What is not written by then is lost with the process.
        drop(self.0.changed.wait_timeout_while(self.lock(), at_most, |queue| !queue.is_done()));
    }

    /// Lines lost since the last call.
    pub(super) fn lost(&self) -> u64 {
        std::mem::take(&mut self.lock().lost)
    }

    /// Lines lost since the last time this told a number: there is none while a line that tells it
    /// would be lost as well.
    pub(super) fn unsaid(&self) -> Option<u64> {
        let mut queue = self.lock();
        let some = queue.unsaid > 0 && queue.is_done() && !queue.failing;
        some.then(|| std::mem::take(&mut queue.unsaid))
    }

    fn next(&self) -> Vec<u8> {
        let waited = self.0.changed.wait_while(self.lock(), |queue| queue.lines.is_empty());
        let mut queue = waited.unwrap_or_else(PoisonError::into_inner);
        let line = queue.lines.pop_front().unwrap_or_default();
        queue.bytes -= line.len();
        queue.writing = true;
        line
    }

    fn written(&self, is_written: bool) {
        let mut queue = self.lock();
        queue.writing = false;
        queue.failing = !is_written;
        if !is_written {
            queue.lose_line();
        }
        self.0.changed.notify_all();
    }

    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, LineQueue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for NonblockingWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.lock();
        if queue.bytes + line.len() > MOST_BYTES {
            queue.lose_line();
        } else {
            queue.bytes += line.len();
            queue.lines.push_back(line.to_vec());
            self.0.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_BYTES, NonblockingWriter};
    use std::io::{self, Read as _, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(60);

    /// Says that it is asked to write, and does as it is told then.
    struct ScriptedWriter(Sender<()>, Receiver<io::Result<()>>);

    impl Write for ScriptedWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(()).ok();
            self.1.recv().unwrap_or(Ok(())).map(|()| bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stalls_costs_lines_that_are_counted_and_no_time() {
        let (writer, (asked, asks), (tell, told)) =
            (NonblockingWriter::default(), channel(), channel());
        writer.begin(ScriptedWriter(asked, told)).unwrap();
        let mut log = writer.clone();
        let line = vec![b'x'; MOST_BYTES / 4];
        log.write_all(&line).unwrap();
        asks.recv_timeout(LONG).unwrap();
        // One is being written, four wait, and three find no room.
        for _ in 0..7 {
            log.write_all(&line).unwrap();
        }
        assert_eq!((writer.lost(), writer.lost(), writer.unsaid()), (3, 0, None));
        let begun = Instant::now();
        writer.flush(Duration::from_millis(50));
        assert!((Duration::from_millis(50)..LONG).contains(&begun.elapsed()));
        drop(tell);
        writer.flush(LONG);
        assert_eq!((writer.unsaid(), writer.unsaid(), writer.lost()), (Some(3), None, 0));
    }

    #[test]
    fn a_line_that_cannot_be_written_is_counted_and_the_next_ones_are_tried() {
        let (writer, (asked, _asks), (tell, told)) =
            (NonblockingWriter::default(), channel(), channel());
        writer.begin(ScriptedWriter(asked, told)).unwrap();
        let mut log = writer.clone();
        tell.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        log.write_all(b"lost\n").unwrap();
        writer.flush(LONG);
        assert_eq!((writer.lost(), writer.unsaid()), (1, None), "it would be lost as well");
        tell.send(Ok(())).unwrap();
        log.write_all(b"written\n").unwrap();
        writer.flush(LONG);
        assert_eq!((writer.lost(), writer.unsaid()), (0, Some(1)));
    }

    #[test]
    fn lines_come_in_their_order_those_from_before_the_thread_too() {
        let (writer, (ours, mut theirs)) =
            (NonblockingWriter::default(), UnixStream::pair().unwrap());
        let mut log = writer.clone();
        log.write_all(b"one\n").unwrap();
        writer.begin(ours).unwrap();
        log.write_all(b"two\n").unwrap();
        writer.flush(LONG);
        let mut read = [0; 8];
        theirs.read_exact(&mut read).unwrap();
        assert_eq!((&read, writer.lost()), (b"one\ntwo\n", 0));
    }
}
