//! Reads a stream ahead of whoever makes sense of it. While a runtime walks its heap, one thread of
//! its writes events and another sends them; on two CPUs a third that understands them takes from
//! these what they need, and what finds no room in the runtime's buffer is lost. So what comes is
//! taken at once, and understood with a lower priority.

use std::io::{self, Read};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

/// Bytes taken at once.
const PIECE: usize = 256 << 10;
/// The part that what waits may take of all memory beyond what the program itself needs. All is
/// needed at the end only, when nothing waits any more.
const PART: usize = 4;
const ITSELF: usize = 48 << 20;
/// For who understands them: a third of the usual weight (`sched_prio_to_weight`,
/// kernel/sched/core.c).
const NICE: i32 = 5;

/// The stream, as it came.
pub struct ReadAheadStream {
    pieces: Receiver<io::Result<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
}

impl ReadAheadStream {
    /// Begins to read `stream` on a thread of its own, as far ahead as a part of so much memory
    /// allows. It ends with the stream, or with the first that nobody takes any more.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn of(mut stream: impl Read + Send + 'static, memory: usize) -> io::Result<Self> {
        let (sender, pieces) = sync_channel(memory.saturating_sub(ITSELF) / PART / PIECE);
        let run = move || {
            loop {
                let mut piece = vec![0; PIECE];
                let read = match stream.read(&mut piece) {
                    Ok(0) => return,
                    Ok(read) => read,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => {
                        // Fails only when nobody reads.
                        sender.send(Err(error)).ok();
                        return;
                    }
                };
                piece.truncate(read);
                if read < PIECE / 2 {
                    piece.shrink_to_fit();
                }
                if sender.send(Ok(piece)).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name("ahead".into()).spawn(run)?;
        Ok(Self { pieces, piece: Vec::new(), at: 0 })
    }

    /// Lets others go first on the calling thread, where that may be.
    pub fn step_back() {
        rustix::process::setpriority_process(None, NICE).ok();
    }
}

impl Read for ReadAheadStream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.piece.len() {
            // The end of the stream is the end of the thread.
            let Ok(piece) = self.pieces.recv() else { return Ok(0) };
            (self.piece, self.at) = (piece?, 0);
        }
        let left = self.piece.get(self.at..).unwrap_or_default();
        let bytes = left.len().min(to.len());
        if let (Some(to), Some(from)) = (to.get_mut(..bytes), left.get(..bytes)) {
            to.copy_from_slice(from);
        }
        self.at += bytes;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::{PIECE, ReadAheadStream};
    use std::io::{self, Read};

    /// So many bytes, a few at a time, then the end or an error.
    struct Stream(usize, Option<io::ErrorKind>);

    impl Read for Stream {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let bytes = (self.0 % 1000 + 1).min(self.0).min(to.len());
            if let (0, Some(kind)) = (self.0, self.1) {
                return Err(kind.into());
            }
            for byte in &mut to[..bytes] {
                *byte = u8::try_from(self.0 % 251).unwrap();
                self.0 -= 1;
            }
            Ok(bytes)
        }
    }

    #[test]
    fn what_comes_is_what_was_sent() {
        const BYTES: usize = PIECE * 2 + 7;
        let (mut sent, mut came) = (Vec::new(), Vec::new());
        Stream(BYTES, None).read_to_end(&mut sent).unwrap();
        ReadAheadStream::of(Stream(BYTES, None), 0).unwrap().read_to_end(&mut came).unwrap();
        assert!(sent == came && came.len() == BYTES);
        let mut broken =
            ReadAheadStream::of(Stream(BYTES, Some(io::ErrorKind::ConnectionReset)), 1 << 30)
                .unwrap();
        came.clear();
        assert_eq!(
            broken.read_to_end(&mut came).unwrap_err().kind(),
            io::ErrorKind::ConnectionReset
        );
        assert!(sent == came, "what came before the error is there");
    }
}
