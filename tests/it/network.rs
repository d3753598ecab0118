//! A directory on a network file system is refused, as the real kernel tells of one: a file system that this process
//! serves by itself through `/dev/fuse`, mounted under the name of one that goes over a network, and of one that does not.

#![expect(unsafe_code, reason = "mounting is a call of libc")]
#![expect(clippy::host_endian_bytes, reason = "the kernel speaks to a process of the same machine")]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use keyonce::{ErrorKind, Options, Store};

use crate::directory::skipped;

/// A file system with an empty root directory and nothing else; whatever is asked beyond that it does not offer.
struct Served {
    at: PathBuf,
    server: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    /// Mounts it as `fuse.NAME`; `None` when this process may not.
    fn mount(name: &str, at: &Path) -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let text = |text: &str| CString::new(text).unwrap();
        let (source, target) = (text(name), text(at.to_str()?));
        let kind = text(&format!("fuse.{name}"));
        let data = text(&format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd()));
        // SAFETY: four strings that live until the call returns.
        let mounted = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, data.as_ptr().cast()) };
        if mounted != 0 {
            return None;
        }
        let server = std::thread::spawn(move || serve(device));
        Some(Self { at: at.to_owned(), server: Some(server) })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let at = CString::new(self.at.to_str().unwrap()).unwrap();
        // SAFETY: a string that lives until the call returns.
        let unmounted = unsafe { libc::umount2(at.as_ptr(), libc::MNT_DETACH) };
        assert!(unmounted == 0 || std::thread::panicking(), "{:?} stays mounted", self.at);
        if let Some(server) = self.server.take() {
            server.join().unwrap();
        }
    }
}

/// Answers until it is unmounted. The layout is that of linux/fuse.h: a request begins with length, operation and number,
/// an answer with length, error and number.
fn serve(mut device: File) {
    const LOOKUP: u32 = 1;
    const GETATTR: u32 = 3;
    const STATFS: u32 = 17;
    const INIT: u32 = 26;
    let mut request = vec![0; 1 << 18];
    while let Ok(read) = device.read(&mut request) {
        if read < 40 {
            break;
        }
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (operation, number) = (word(4), &request[8..16]);
        let body = match operation {
            INIT => {
                // Version 7.31, and nothing that is optional but requests of a page.
                let mut body = [7_u32.to_ne_bytes(), 31_u32.to_ne_bytes()].concat();
                body.resize(64, 0);
                body[20..24].copy_from_slice(&4096_u32.to_ne_bytes());
                Some(body)
            }
            GETATTR => {
                let mut body = vec![0; 104];
                // Behind 16 bytes of validity: the number of the file at 0, the mode at 60, the links at 64.
                body[16] = 1;
                body[76..80].copy_from_slice(&0o040_755_u32.to_ne_bytes());
                body[80..84].copy_from_slice(&2_u32.to_ne_bytes());
                Some(body)
            }
            STATFS => Some(vec![0; 80]),
            _ => None,
        };
        let error = match operation {
            LOOKUP => -libc::ENOENT,
            _ if body.is_some() => 0,
            _ => -libc::ENOSYS,
        };
        let body = body.unwrap_or_default();
        let bytes = u32::try_from(16 + body.len()).unwrap();
        let answer = [&bytes.to_ne_bytes()[..], &error.to_ne_bytes(), number, &body].concat();
        if device.write_all(&answer).is_err() {
            // The request was interrupted, or wants no answer.
        }
    }
}

#[test]
fn a_store_on_a_file_system_that_a_network_serves_is_refused_unless_an_option_says_otherwise() {
    for (name, refused) in [("sshfs", true), ("s3fs", true), ("mergerfs", false)] {
        let root = tempfile::tempdir().unwrap();
        let at = root.path().join("mounted");
        fs::create_dir(&at).unwrap();
        let Some(served) = Served::mount(name, &at) else {
            skipped("a_store_on_a_file_system_that_a_network_serves_is_refused: this process may not mount");
            return;
        };
        for dir in [at.clone(), at.join("not/made/yet")] {
            let error = Store::open(&dir, Options::new()).unwrap_err();
            let message = error.to_string();
            let named = message.contains("network_file_system") && message.contains(&format!("fuse.{name}"));
            assert_eq!((error.kind() == ErrorKind::InvalidOptions, named), (refused, refused), "{name}: {error:?}");
            // With the option it comes as far as to what this file system does not offer.
            let error = Store::open(&dir, Options::new().network_file_system(true)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{name}: {error:?}");
        }
        drop(served);
        assert!(Store::open(&at, Options::new()).is_ok(), "what it was mounted on is local");
    }
}
