// SPDX-License-Identifier: Apache-2.0
//! Sealed frames over a blocking socket.
//!
//! A [`Sender`] and a [`Receiver`] are the two directions of one connection. Payloads go
//! straight from and into the caller's memory. Any doubt about a frame (another run, a wrong
//! sequence number or tag) ends the connection, because it cannot continue after that.
//!
//! Encrypted payloads are sent and read in chunks: a chunk is on its way while the next one is
//! encrypted, and is decrypted while the next one arrives. A connection keeps memory for one chunk
//! in each direction.

mod encrypted;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::Pod;
use edl_core::id::{BatchId, Generation, RunId};
use edl_core::server::Refusal;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use self::encrypted::Encrypted;
use crate::cipher::{self, Buffer};
use crate::frame::{self, FrameKind, HEADER_LEN, Header, TAG_LEN};
use crate::isolation;
use crate::key;
use crate::seal::{Guard, Hasher};

#[cfg(target_endian = "big")]
compile_error!("payloads are little-endian and travel as they lie in memory");

/// How often a blocked read or write looks at its deadline.
const TICK: Duration = Duration::from_millis(250);
/// What a Unix socket may hold. Measured: with less the two ends wait for each other, with more
/// the bytes have left the cache before they are read.
const SOCKET_BUFFER: usize = 512 << 10;
/// A silent TCP peer is tried after this long, this often, this many times.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(5), Duration::from_secs(2), 5);
/// Read at once: what is hashed next is then still in the cache.
const READ_CHUNK: usize = 128 << 10;
/// Memory that is allocated for a part of a payload of which nothing has arrived.
const FIRST_CLAIM: usize = 256 << 10;

/// Why a call over the data plane failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("generation {ours} is outdated: the servers are at generation {theirs}")]
    Generation { ours: Generation, theirs: Generation },
    #[error("the server does not serve this generation yet")]
    NotServing,
    #[error("the connection was closed")]
    Closed,
    #[error("gave up waiting for {waiting_for}")]
    Deadline { waiting_for: String },
    #[error("refused: {0}")]
    Refused(String),
    #[error("the server is at a different step: {0}")]
    StepMismatch(String),
    #[error(
        "the peer uses version {theirs} of the data protocol, this build uses {ours}; run the same \
         build everywhere"
    )]
    Version { ours: u16, theirs: u16 },
    #[error("cannot {action}")]
    Io { action: String, source: io::Error },
    #[error("invalid frame")]
    Frame(#[source] frame::Error),
    #[error("frame {sequence} was altered or repeated, or belongs to another session")]
    Forged { sequence: u64 },
    #[error("cannot generate a nonce")]
    Nonce(#[from] key::Error),
}

impl From<frame::Error> for Error {
    fn from(error: frame::Error) -> Self {
        match error {
            frame::Error::Version { ours, theirs } => Self::Version { ours, theirs },
            frame::Error::Magic
            | frame::Error::Kind(_)
            | frame::Error::Length { .. }
            | frame::Error::Parts(_) => Self::Frame(error),
        }
    }
}

impl Error {
    /// What a server's refusal means to a client at generation `ours`.
    #[must_use]
    pub fn from_refusal(refusal: Refusal, ours: Generation) -> Self {
        match refusal {
            Refusal::Generation { current } => Self::Generation { ours, theirs: current },
            Refusal::NotServing => Self::NotServing,
            Refusal::Waited(waiting_for) => Self::Deadline { waiting_for },
            Refusal::StepMismatch(text) => Self::StepMismatch(text),
            Refusal::Other(text) => Self::Refused(text),
        }
    }

    /// Why a peer that has not proven the key was refused, without anything that it has sent. None
    /// if that is nothing to report.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Closed | Self::NotServing => None,
            Self::Refused(_) => Some("it does not have this job's key, or belongs to another run"),
            Self::Deadline { .. } => Some("it did not prove the job's key in time"),
            Self::Version { .. } => Some("it uses another version of the data protocol"),
            Self::Frame(_) | Self::Forged { .. } => Some("it does not use the data protocol"),
            Self::Io { .. } | Self::Nonce(_) => Some("the connection failed"),
            Self::Generation { .. } | Self::StepMismatch(_) => Some("it is out of date"),
        }
    }
}

/// A connected socket of either kind.
#[derive(Debug)]
pub enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Takes over a connected Unix socket.
    pub fn unix(stream: UnixStream) -> Result<Self, Error> {
        Self::Unix(stream).prepare()
    }

    /// Takes over a connected TCP socket.
    pub fn tcp(stream: TcpStream) -> Result<Self, Error> {
        Self::Tcp(stream).prepare()
    }

    pub fn connect_unix(path: &Path, timeout: Duration) -> Result<Self, Error> {
        let connect = || -> io::Result<UnixStream> {
            isolation::hold(timeout)?;
            let flags = SocketFlags::CLOEXEC;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // A stopped server with a full backlog would block a plain connect forever.
            sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(timeout))?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(UnixStream::from(socket))
        };
        let stream = connect().map_err(|source| Error::Io {
            action: format!("connect to `{}`", path.display()),
            source,
        })?;
        Self::unix(stream)
    }

    pub fn connect_tcp(address: &str, timeout: Duration) -> Result<Self, Error> {
        let connect = || -> io::Result<TcpStream> {
            isolation::hold(timeout)?;
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
            for address in address.to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, timeout) {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let stream = connect()
            .map_err(|source| Error::Io { action: format!("connect to `{address}`"), source })?;
        Self::tcp(stream)
    }

    fn prepare(self) -> Result<Self, Error> {
        self.set_options()
            .map_err(|source| Error::Io { action: "set up a connection".into(), source })?;
        Ok(self)
    }

    fn set_options(&self) -> io::Result<()> {
        sockopt::set_socket_timeout(self, sockopt::Timeout::Recv, Some(TICK))?;
        sockopt::set_socket_timeout(self, sockopt::Timeout::Send, Some(TICK))?;
        match self {
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                sockopt::set_socket_send_buffer_size(self, SOCKET_BUFFER)?;
            }
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                let (idle, interval, count) = KEEPALIVE;
                sockopt::set_socket_keepalive(self, true)?;
                sockopt::set_tcp_keepidle(self, idle)?;
                sockopt::set_tcp_keepintvl(self, interval)?;
                sockopt::set_tcp_keepcnt(self, count)?;
            }
        }
        Ok(())
    }

    /// The address of the other end, if it has one.
    #[must_use]
    pub fn peer(&self) -> Option<SocketAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(stream) => stream.peer_addr().ok(),
        }
    }

    /// Whether the connection never leaves this machine's kernel.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Whether both ends are on this host, as far as their addresses say.
    #[must_use]
    pub fn is_same_host(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp(stream) => match (stream.local_addr(), stream.peer_addr()) {
                (Ok(here), Ok(there)) => is_one_host(here.ip(), there.ip()),
                _ => false,
            },
        }
    }

    /// The addresses of this end and of the peer, for messages.
    pub(crate) fn ends(&self) -> (String, String) {
        let Self::Tcp(stream) = self else { return ("unix".into(), "unix".into()) };
        let text = |address: io::Result<SocketAddr>| {
            address.map_or_else(|_| "unknown".into(), |address| address.to_string())
        };
        (text(stream.local_addr()), text(stream.peer_addr()))
    }

    /// Ends the connection: every call that is blocked on it returns.
    pub fn shutdown(&self) {
        // An error means that the peer has already closed it.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    /// Whether the peer has closed its end, as far as can be seen without waiting.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        if isolation::remaining().is_some() {
            return false;
        }
        let mut byte = [0_u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self, byte.as_mut_slice(), flags) {
            Ok((n, _)) => n == 0,
            Err(error) => error != rustix::io::Errno::AGAIN && error != rustix::io::Errno::INTR,
        }
    }

    fn read(&self, out: &mut [u8]) -> io::Result<usize> {
        isolation::hold(TICK)?;
        match self {
            Self::Unix(stream) => (&*stream).read(out),
            Self::Tcp(stream) => (&*stream).read(out),
        }
    }

    fn read_vectored(&self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        isolation::hold(TICK)?;
        match self {
            Self::Unix(stream) => (&*stream).read_vectored(parts),
            Self::Tcp(stream) => (&*stream).read_vectored(parts),
        }
    }

    fn write_vectored(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        isolation::hold(TICK)?;
        match self {
            Self::Unix(stream) => (&*stream).write_vectored(parts),
            Self::Tcp(stream) => (&*stream).write_vectored(parts),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

/// Whether the two addresses of a connection belong to one host.
fn is_one_host(here: IpAddr, there: IpAddr) -> bool {
    let (here, there) = (here.to_canonical(), there.to_canonical());
    there.is_loopback() || there == here
}

/// What became of one read or write.
enum Moved {
    Bytes(usize),
    /// Nothing within a tick.
    Nothing,
}

fn moved(result: io::Result<usize>, action: &str) -> Result<Moved, Error> {
    const QUIET: [io::ErrorKind; 3] =
        [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut, io::ErrorKind::Interrupted];
    const GONE: [io::ErrorKind; 3] = [
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::BrokenPipe,
        io::ErrorKind::ConnectionAborted,
    ];
    match result {
        Ok(0) => Err(Error::Closed),
        Ok(n) => Ok(Moved::Bytes(n)),
        Err(error) if QUIET.contains(&error.kind()) => Ok(Moved::Nothing),
        Err(error) if GONE.contains(&error.kind()) => Err(Error::Closed),
        Err(source) => Err(Error::Io { action: action.into(), source }),
    }
}

/// The sending direction.
pub struct Sender {
    stream: Arc<Stream>,
    run: RunId,
    guard: Option<Guard>,
    next: u64,
    /// How long the peer may take no byte.
    patience: Duration,
    /// For everything, however many bytes the peer takes.
    deadline: Option<Instant>,
    /// The chunk that is being sent, encrypted.
    chunk: Buffer,
}

impl Sender {
    #[must_use]
    pub fn new(stream: Arc<Stream>, run: RunId, patience: Duration) -> Self {
        let (guard, deadline, chunk) = (None, None, Buffer::default());
        Self { stream, run, guard, next: 0, patience, deadline, chunk }
    }

    /// From now on, all sending ends at this time.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// From now on frames are protected and counted.
    pub fn guard(&mut self, guard: Guard) {
        self.guard = Some(guard);
        self.next = 1;
    }

    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        matches!(self.guard, Some(Guard::Encrypted(_)))
    }

    #[must_use]
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The number of the next frame.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next
    }

    /// Sends one frame whose payload is `parts`, one after the other.
    pub fn send(
        &mut self,
        kind: FrameKind,
        generation: Generation,
        batch: BatchId,
        parts: &[&[u8]],
    ) -> Result<(), Error> {
        let length = parts.iter().map(|part| part.len() as u64).sum();
        let mut header = Header {
            kind,
            run: self.run,
            generation,
            sequence: self.next,
            batch,
            length,
            tag: [0; TAG_LEN],
        };
        let mut bytes = header.encode();
        // The same check as at the other end, where the error would be harder to find.
        Header::decode(&bytes)?;
        let limits = (self.patience, self.deadline);
        match &mut self.guard {
            None => {}
            Some(Guard::Tagged(seal)) => {
                let mut hasher = seal.begin();
                hasher.update(&bytes);
                parts.iter().for_each(|part| hasher.update(part));
                header.tag = hasher.tag();
                bytes = header.encode();
                self.next += 1;
            }
            Some(Guard::Encrypted(cipher)) => {
                self.next += 1;
                self.chunk.clear();
                cipher.seal_header(&bytes, &mut self.chunk);
                // The header goes out with the first chunk.
                for chunk in cipher::chunks(parts) {
                    cipher.seal(&chunk, &mut self.chunk);
                    write(&self.stream, limits, &mut [IoSlice::new(&self.chunk)])?;
                    self.chunk.clear();
                }
                return write(&self.stream, limits, &mut [IoSlice::new(&self.chunk)]);
            }
        }
        let mut slices = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(&bytes));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        write(&self.stream, limits, &mut slices)
    }

    /// The guard and the number of the next frame, for a caller that writes in another way.
    pub(crate) fn into_guard(self) -> (Option<Guard>, u64) {
        (self.guard, self.next)
    }
}

fn write(
    stream: &Stream,
    (patience, deadline): (Duration, Option<Instant>),
    mut left: &mut [IoSlice<'_>],
) -> Result<(), Error> {
    // Also skips empty parts, after which a write of nothing would look like a closed peer.
    IoSlice::advance_slices(&mut left, 0);
    let mut since = None;
    while !left.is_empty() {
        check(deadline)?;
        match moved(stream.write_vectored(left), "send a frame")? {
            Moved::Bytes(n) => {
                IoSlice::advance_slices(&mut left, n);
                since = None;
            }
            Moved::Nothing => expire(&mut since, patience, "the peer to read a frame")?,
        }
    }
    Ok(())
}

/// The receiving direction.
pub struct Receiver {
    stream: Arc<Stream>,
    /// `None` accepts frames of any run.
    run: Option<RunId>,
    guard: Option<Guard>,
    next: u64,
    patience: Duration,
    /// For everything, however many bytes come: a peer cannot extend it.
    deadline: Option<Instant>,
    /// The frame being read.
    incoming: Option<IncomingFrame>,
    /// A decrypted chunk that contains several parts of a payload.
    chunk: Vec<u8>,
}

struct IncomingFrame {
    sequence: u64,
    tag: [u8; TAG_LEN],
    /// What is hashed of a frame with a tag.
    hasher: Option<Hasher>,
    /// Bytes of the payload that have not been returned yet.
    left: u64,
    /// Those of them that are in the chunk, at its end.
    n_decrypted: usize,
}

impl Receiver {
    #[must_use]
    pub fn new(stream: Arc<Stream>, run: RunId, patience: Duration) -> Self {
        Self { run: Some(run), ..Self::of_any_run(stream, patience) }
    }

    /// For a process that does not know its run yet.
    #[must_use]
    pub fn of_any_run(stream: Arc<Stream>, patience: Duration) -> Self {
        let (run, guard, deadline, incoming, chunk) = (None, None, None, None, Vec::new());
        Self { stream, run, guard, next: 0, patience, deadline, incoming, chunk }
    }

    /// From now on, all receiving ends at this time.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// From now on frames must be protected and counted.
    pub fn guard(&mut self, guard: Guard) {
        self.guard = Some(guard);
        self.next = 1;
    }

    #[must_use]
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The guard and the number of the next frame, for a caller that reads in another way.
    pub(crate) fn into_guard(self) -> (Option<Guard>, u64) {
        (self.guard, self.next)
    }

    #[must_use]
    pub(crate) fn is_protected(&self) -> bool {
        self.guard.is_some()
    }

    /// Waits for the next frame and reads its header. `idle` is called on every tick in which
    /// nothing came, and ends the wait by an error.
    ///
    /// # Panics
    /// If the frame before was not finished.
    pub fn header(&mut self, idle: &mut dyn FnMut() -> Result<(), Error>) -> Result<Header, Error> {
        assert!(self.incoming.is_none(), "the frame before is finished");
        let mut bytes = [0; HEADER_LEN];
        let n_first = loop {
            check(self.deadline)?;
            match moved(self.stream.read(&mut bytes), "read a frame")? {
                Moved::Bytes(n) => break n,
                Moved::Nothing => idle()?,
            }
        };
        self.read(&mut bytes[n_first..], None)?;
        if let Some(Guard::Encrypted(cipher)) = &mut self.guard
            && !cipher.open_header(&mut bytes)
        {
            return Err(Error::Forged { sequence: self.next });
        }
        let header = Header::decode(&bytes)?;
        if let Some(run) = self.run.filter(|run| *run != header.run) {
            let theirs = header.run;
            return Err(Error::Refused(format!("the peer's run is {theirs}, this is run {run}")));
        }
        if header.sequence != self.next {
            return Err(Error::Forged { sequence: header.sequence });
        }
        let hasher = match &self.guard {
            Some(Guard::Tagged(seal)) => {
                let mut hasher = seal.begin();
                hasher.update(&Header { tag: [0; TAG_LEN], ..header }.encode());
                Some(hasher)
            }
            Some(Guard::Encrypted(_)) | None => None,
        };
        let (sequence, tag, left) = (header.sequence, header.tag, header.length);
        self.incoming = Some(IncomingFrame { sequence, tag, hasher, left, n_decrypted: 0 });
        Ok(header)
    }

    /// Reads the next part of the payload into `out`, which must not be used before `finish`.
    pub fn fill<T: Pod>(&mut self, out: &mut [T]) -> Result<(), Error> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        let mut frame = self.incoming.take().ok_or(Error::Closed)?;
        if frame.left < bytes.len() as u64 {
            return Err(Error::Forged { sequence: frame.sequence });
        }
        if let Some(Guard::Encrypted(cipher)) = &mut self.guard {
            let source = Encrypted { stream: &self.stream, patience: self.patience, cipher };
            source.fill(&mut frame, &mut self.chunk, bytes)?;
        } else {
            self.read(bytes, frame.hasher.as_mut())?;
            frame.left -= bytes.len() as u64;
        }
        self.incoming = Some(frame);
        Ok(())
    }

    /// Reads the next `n` numbers of the payload into `numbers`, which must not be used before
    /// `finish`. Memory grows with the bytes that arrive, so a length alone allocates little.
    pub fn fill_vec<T: Pod>(&mut self, numbers: &mut Vec<T>, n: usize) -> Result<(), Error> {
        numbers.truncate(n);
        let mut n_read = 0;
        while n_read < n {
            let n_claimed = n.min((FIRST_CLAIM / size_of::<T>()).max(2 * n_read));
            if numbers.len() < n_claimed {
                numbers.resize(n_claimed, T::zeroed());
            }
            self.fill(&mut numbers[n_read..])?;
            n_read = numbers.len();
        }
        Ok(())
    }

    /// Checks that the frame is at its end and that its tag fits.
    pub fn finish(&mut self) -> Result<(), Error> {
        let frame = self.incoming.take().ok_or(Error::Closed)?;
        let is_genuine = frame.hasher.is_none_or(|hasher| hasher.matches(frame.tag));
        if frame.left != 0 || !is_genuine {
            return Err(Error::Forged { sequence: frame.sequence });
        }
        if self.guard.is_some() {
            self.next += 1;
        }
        Ok(())
    }

    /// Discards what is left of the frame, and finishes it.
    pub fn skip(&mut self) -> Result<(), Error> {
        let mut scratch = [0_u8; 4096];
        while let Some(left) =
            self.incoming.as_ref().map(|frame| frame.left).filter(|left| *left > 0)
        {
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(scratch.len());
            self.fill(&mut scratch[..n])?;
        }
        self.finish()
    }

    /// Reads what is left of a small frame and finishes it.
    pub fn small(&mut self) -> Result<Vec<u8>, Error> {
        let left = self.incoming.as_ref().map_or(0, |frame| frame.left);
        let mut bytes = vec![0; usize::try_from(left).unwrap_or(0)];
        self.fill(&mut bytes)?;
        self.finish()?;
        Ok(bytes)
    }

    fn read(&self, out: &mut [u8], mut hasher: Option<&mut Hasher>) -> Result<(), Error> {
        let mut n_read = 0;
        let mut since = None;
        while n_read < out.len() {
            check(self.deadline)?;
            let end = out.len().min(n_read + READ_CHUNK);
            match moved(self.stream.read(&mut out[n_read..end]), "read a frame")? {
                Moved::Bytes(n) => {
                    if let Some(hasher) = &mut hasher {
                        hasher.update(&out[n_read..n_read + n]);
                    }
                    n_read += n;
                    since = None;
                }
                Moved::Nothing => expire(&mut since, self.patience, "the rest of a frame")?,
            }
        }
        Ok(())
    }
}

/// Ends a conversation that has a deadline.
fn check(deadline: Option<Instant>) -> Result<(), Error> {
    match deadline {
        Some(deadline) if Instant::now() >= deadline => {
            Err(Error::Deadline { waiting_for: "a handshake".into() })
        }
        Some(_) | None => Ok(()),
    }
}

/// Ends a wait without progress that has lasted `patience`.
fn expire(since: &mut Option<Instant>, patience: Duration, what: &str) -> Result<(), Error> {
    let since = since.get_or_insert_with(Instant::now);
    if since.elapsed() < patience {
        return Ok(());
    }
    Err(Error::Deadline { waiting_for: what.into() })
}

#[cfg(test)]
mod tests;
