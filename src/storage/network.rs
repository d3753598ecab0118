//! Which directories lie on a file system that other machines may have, too.
//!
//! A store rests on two things that such file systems do not always give: a lock that excludes every other process,
//! and mappings that show what is in the file. Most of them also answer a sync before the bytes are anywhere safe, or
//! say so when it is too late. The kernel tells what kind of file system a directory is on: statfs(2) by a number, and
//! `/proc/self/mountinfo` by a name, which tells those apart that a user's process serves (FUSE): some are local, some
//! are not.

use std::io;
use std::path::Path;

/// The name of the network or cluster file system that a directory lies on, or that it would lie on if it were made;
/// `None` when it is another kind, or the system does not say.
///
/// # Errors
///
/// What statfs(2) says of the nearest directory that exists.
#[cfg(target_os = "linux")]
pub(crate) fn network_file_system(directory: &Path) -> io::Result<Option<String>> {
    for existing in directory.ancestors() {
        // Of a relative path, the last ancestor is the empty one.
        let existing = if existing.as_os_str().is_empty() { Path::new(".") } else { existing };
        match rustix::io::retry_on_intr(|| rustix::fs::statfs(existing)) {
            Ok(found) => {
                // Some are negative where the field is a signed one of 32 bits.
                let magic = u32::try_from(found.f_type & 0xFFFF_FFFF).expect("32 bits are 32 bits");
                return Ok(judge(magic, || mounted_as(existing)));
            }
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn network_file_system(_directory: &Path) -> io::Result<Option<String>> {
    Ok(None)
}

/// Numbers of file systems that another machine serves or shares, or the host of this virtual one. From the headers of
/// Linux (`linux/magic.h` and those of each file system) and the list that stat(1) of the GNU coreutils has.
const SHARED: [(u32, &str); 23] = [
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFF53_4D42, "CIFS"),
    (0xFE53_4D42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x5346_414F, "AFS"),
    (0x6B41_4653, "kAFS"),
    (0x7375_7245, "Coda"),
    (0x564C, "NCP"),
    (0x00C3_6400, "Ceph"),
    (0x0BD0_0BD0, "Lustre"),
    (0x0116_1970, "GFS2"),
    (0x7461_636F, "OCFS2"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0xAAD7_AAEA, "PanFS"),
    (0x2003_0528, "OrangeFS"),
    (0xBEEF_DEAD, "SNFS"),
    (0x0131_11A8, "IBRIX"),
    (0x6163_6673, "ACFS"),
    (0xBACB_ACBC, "vmhgfs"),
    (0x786F_4256, "vboxsf"),
    (0x7C7C_6673, "prl_fs"),
];

/// The number of every file system that a user's process serves.
const FUSE: u32 = 0x6573_5546;

/// Those of them that are known to be on a network, as the kernel names them.
const SHARED_FUSE: [&str; 24] = [
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.s3fs",
    "fuse.s3ql",
    "fuse.goofys",
    "fuse.geesefs",
    "fuse.mountpoint-s3",
    "fuse.gcsfuse",
    "fuse.blobfuse",
    "fuse.blobfuse2",
    "fuse.rclone",
    "fuse.davfs",
    "fuse.curlftpfs",
    "fuse.nfs",
    "fuse.smbnetfs",
    "fuse.juicefs",
    "fuse.mfs",
    "fuse.lizardfs",
    "fuse.seaweedfs",
    "fuse.dfs",
    "fuse.vmhgfs-fuse",
    "virtiofs",
];

/// The name of what `magic` stands for, if it is shared; `mounted_as` says how the kernel names it.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "the numbers are those of Linux"))]
fn judge(magic: u32, mounted_as: impl FnOnce() -> Option<String>) -> Option<String> {
    if magic == FUSE {
        return mounted_as().filter(|name| SHARED_FUSE.contains(&name.as_str()));
    }
    SHARED.iter().find(|(shared, _)| *shared == magic).map(|(_, name)| (*name).to_owned())
}

/// How the kernel names the file system of a path.
#[cfg(target_os = "linux")]
fn mounted_as(path: &Path) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let device = std::fs::metadata(path).ok()?.dev();
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    name_in(&std::fs::read_to_string("/proc/self/mountinfo").ok()?, &device)
}

/// The type of the file system on a device, as proc_pid_mountinfo(5) has it: the first field behind the lone dash.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "a file of Linux"))]
fn name_in(mountinfo: &str, device: &str) -> Option<String> {
    let line = mountinfo.lines().find(|line| line.split(' ').nth(2) == Some(device))?;
    let (_, behind) = line.split_once(" - ")?;
    behind.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn nothing() -> Option<String> {
        panic!("the number says it all")
    }

    #[test]
    fn every_network_and_cluster_file_system_is_known_by_its_number() {
        for (magic, name) in SHARED {
            assert_eq!(judge(magic, nothing).as_deref(), Some(name));
        }
        for (at, (magic, name)) in SHARED.iter().enumerate() {
            assert!(!SHARED.iter().skip(at + 1).any(|(other, _)| other == magic), "{name} stands there twice");
        }
    }

    #[test]
    fn no_local_file_system_is_taken_for_a_shared_one() {
        // linux/magic.h: ext2 to ext4, XFS, btrfs, tmpfs, ramfs, overlayfs, F2FS, ZFS, bcachefs, exFAT, FAT, NTFS3,
        // squashfs, UBIFS, JFS, ReiserFS, NILFS2, eCryptfs, hugetlbfs.
        let local = [
            0xEF53,
            0x5846_5342,
            0x9123_683E,
            0x0102_1994,
            0x8584_58F6,
            0x794C_7630,
            0xF2F5_2010,
            0x2FC1_2FC1,
            0xCA45_1A4E,
            0x2011_BAB0,
            0x4D44,
            0x7366_746E,
            0x7371_7368,
            0x2405_1905,
            0x3153_464A,
            0x5265_4973,
            0x3434,
            0xF15F,
            0x9584_58F6,
        ];
        for magic in local {
            assert_eq!(judge(magic, nothing), None, "{magic:#x}");
        }
    }

    #[test]
    fn what_a_process_serves_is_judged_by_its_name() {
        for shared in SHARED_FUSE {
            assert_eq!(judge(FUSE, || Some(shared.to_owned())).as_deref(), Some(shared));
        }
        let local = ["fuse", "fuseblk", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.gocryptfs", "fuse.ntfs-3g"];
        for local in local {
            assert_eq!(judge(FUSE, || Some(local.to_owned())), None, "{local}");
        }
        assert_eq!(judge(FUSE, || None), None, "what is not known is not refused");
    }

    #[test]
    fn the_kernels_list_of_mounts_is_read_by_device() {
        let list = "21 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
                    28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
                    90 28 0:52 / /mnt/far\\040away rw,nosuid,nodev shared:9 master:3 - fuse.sshfs me@there:/ rw\n\
                    91 28 0:53 / /mnt/bare rw - virtiofs host rw\n";
        assert_eq!(name_in(list, "0:52").as_deref(), Some("fuse.sshfs"));
        assert_eq!(name_in(list, "0:53").as_deref(), Some("virtiofs"));
        assert_eq!(name_in(list, "254:0").as_deref(), Some("ext4"));
        assert_eq!(name_in(list, "254:1"), None);
        assert_eq!(name_in("", "254:0"), None);
        assert_eq!(name_in("a line of another kind", "kind"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_systems_own_list_of_mounts_names_the_file_system_of_a_directory() {
        let root = tempfile::tempdir().unwrap();
        if rustix::fs::statfs(root.path()).unwrap().f_type == 0x0102_1994 {
            assert_eq!(mounted_as(root.path()).as_deref(), Some("tmpfs"));
        }
        assert_eq!(mounted_as(Path::new("/proc")).as_deref(), Some("proc"));
    }

    #[test]
    fn a_directory_that_does_not_exist_is_judged_by_where_it_would_be() {
        let root = tempfile::tempdir().unwrap();
        let here = network_file_system(root.path()).unwrap();
        assert_eq!(network_file_system(&root.path().join("a/b/c")).unwrap(), here);
        std::fs::write(root.path().join("file"), "").unwrap();
        assert_eq!(network_file_system(&root.path().join("file/below")).unwrap(), here);
        network_file_system(Path::new("a/relative/path")).unwrap();
        network_file_system(Path::new("")).unwrap();
    }
}
