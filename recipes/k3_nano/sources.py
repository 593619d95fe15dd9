"""The Debian packages the corpus is made of: which files are read, under which licence.

Every package is in the ``main`` component of Debian 12, so each licence is free in Debian's sense; the licence
column repeats what the package's own ``copyright`` file says about the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package: ``kind`` picks the converter, ``include``/``exclude`` are regular expressions on the path."""

    package: str
    licence: str
    kind: str
    include: str
    exclude: str = r"$^"
    cap_mb: float = 12.0


# Index pages, search pages, copies of source code and release notes say little in sentences.
NO_PROSE = (
    r"(genindex|/search|py-modindex|modindex|/_modules/|_sources|/_static/|changelog|releasenotes|release-notes"
    r"|/releases/|whatsnew/[01]\.|ChangeLog|/contents\.html|hierarchy|copyright|/license|keyword_list)"
)

SOURCES: tuple[Source, ...] = (
    Source("python3.11-doc", "PSF-2.0", "html", r"/html/.*\.html$", NO_PROSE + "|/whatsnew/changelog"),
    Source(
        "libpython3.11-stdlib", "PSF-2.0", "python", r"\.py$", r"(lib2to3|idlelib|encodings/|_sysconfigdata|pydoc_data)"
    ),
    Source("debian-policy", "GPL-2.0-or-later", "html", r"policy\.html/[^/]*\.html$|\.html$", NO_PROSE + "|upgrading"),
    Source("developers-reference", "GPL-2.0-or-later", "html", r"\.html$", NO_PROSE),
    Source("debian-handbook", "CC-BY-SA-3.0 or GPL-2.0-or-later", "html", r"/en-US/.*\.html$"),
    Source("debian-reference-en", "GPL-2.0-or-later", "html", r"\.en\.html$|\.html$"),
    Source("debian-faq", "GPL-2.0-or-later", "html", r"\.en\.html$"),
    Source("debian-history", "GPL-2.0-or-later", "html", r"\.en\.html$|/docs/[^.]*\.html$", NO_PROSE),
    Source("debian-kernel-handbook", "GPL-2.0-or-later", "html", r"\.html$"),
    Source("installation-guide-amd64", "GPL-2.0-or-later", "html", r"/en/.*\.html$"),
    Source("debmake-doc", "MIT", "html", r"/html/[^.]*\.en\.html$"),
    Source("maint-guide", "GPL-2.0-or-later", "html", r"\.en\.html$"),
    Source(
        "linux-doc-6.1",
        "GPL-2.0-only WITH Linux-syscall-note",
        "html",
        r"/html/.*\.html$",
        NO_PROSE + r"|/translations/|media/v4l/(videodev|.*-h\.html)|\.h\.html|devices\.html",
        30.0,
    ),
    Source(
        "postgresql-doc-15",
        "PostgreSQL",
        "html",
        r"\.html$",
        r"/(release|features-sql|sql-keywords|errcodes|bookindex)",
    ),
    Source("apache2-doc", "Apache-2.0", "html", r"/manual/en/.*\.html$", r"sitemap|quickreference|directives\.html"),
    Source("git-doc", "GPL-2.0-only", "html", r"\.html$", "RelNotes"),
    Source(
        "perl-doc",
        "Artistic-1.0-Perl or GPL-1.0-or-later",
        "pod",
        r"\.pod$",
        r"(perl\d*delta|perlcn|perljp|perlko|perltw|perlebcdic|perltoc)",
    ),
    Source(
        "sqlite3-doc",
        "blessing (public domain)",
        "html",
        r"\.html$",
        r"(changes|releaselog|matrix|sqllogictest|keyword_index|/vdbe/|syntax/|hashes|requirements|/releaselog/)",
    ),
    Source("manpages", "various free licences (see the copyright file of the package)", "man", r"\.\d\w*\.gz$"),
    Source("manpages-dev", "various free licences (see the copyright file of the package)", "man", r"\.\d\w*\.gz$"),
    Source("freebsd-manpages", "BSD-2-Clause and BSD-4-Clause", "man", r"\.\d\w*\.gz$"),
    Source("systemd", "LGPL-2.1-or-later", "man", r"/man/man\d/.*\.gz$"),
    Source("libssl-doc", "Apache-2.0", "man", r"/man/man\d/.*\.gz$", r"i2d_|d2i_", 3.0),
    Source("dict-jargon", "public domain", "dict", r"\.dict\.dz$"),
    Source("dict-devil", "public domain", "dict", r"\.dict\.dz$"),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        "html",
        r"/html/(book|reference|nomicon|rust-by-example|cargo|edition-guide|rustc|rustdoc|embedded-book|std|alloc)/"
        r".*\.html$",
        NO_PROSE
        + r"|/print\.html|/arch/|intrinsics|core_arch|/simd/|2018-edition|second-edition|first-edition|/all\.html",
        10.0,
    ),
    Source("python-django-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE),
    Source("python-sqlalchemy-doc", "MIT", "html", r"\.html$", NO_PROSE + "|migration"),
    Source(
        "python-pandas-doc",
        "BSD-3-Clause",
        "html",
        r"/html/(user_guide|getting_started|development|reference/api)/.*\.html$",
        NO_PROSE,
        6.0,
    ),
    Source("cmake-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + r"|/release/"),
    Source(
        "llvm-15-doc",
        "Apache-2.0 WITH LLVM-exception",
        "html",
        r"\.html$",
        NO_PROSE + r"|AMDGPU/|AMDGPUAsm|ReleaseNotes|DiagnosticsReference",
        8.0,
    ),
    Source("exim4-doc-html", "GPL-2.0-or-later", "html", r"\.html$"),
    Source("postfix-doc", "IPL-1.0 or EPL-2.0", "html", r"\.html$", r"RELEASE|HISTORY"),
    Source("bind9-doc", "MPL-2.0", "html", r"\.html$", NO_PROSE + "|notes"),
    Source("haproxy-doc", "GPL-2.0-or-later", "html", r"\.html$"),
    Source("r-doc-html", "GPL-2.0-only or GPL-3.0-only", "html", r"\.html$"),
    Source("octave-doc", "GPL-3.0-or-later", "html", r"\.html$"),
    Source(
        "python-celery-doc",
        "CC-BY-SA-4.0 (documentation), BSD-3-Clause (code)",
        "html",
        r"\.html$",
        NO_PROSE + "|/history/",
    ),
    Source("python-flask-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|changes"),
    Source("python-requests-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|updates"),
    Source("python-scrapy-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|news"),
    Source("nodejs-doc", "MIT", "html", r"/api/.*\.html$", r"/all\.html|index"),
    Source("gnome-user-docs", "CC-BY-SA-3.0", "mallard", r"/help/C/.*\.page$"),
    Source("nova-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE),
    Source("neutron-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE),
    Source("swift-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE),
    Source("cinder-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/_autosummary|contributor/api", 4.0),
    Source("keystone-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|contributor/api|/api/"),
    Source("gap-doc", "GPL-2.0-or-later", "html", r"/chap[^/]*[^j]\.html$", r"_mj|chapInd|chapBib"),
    Source("libboost1.81-doc", "BSL-1.0", "html", r"\.html$", NO_PROSE + r"|/reference/|acknowledg|history", 12.0),
    Source("erlang-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|notes|_app\\.html|wx|users_guide\\.html", 12.0),
    Source("python-sympy-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE, 4.0),
    Source("python-astropy-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|/api/", 5.0),
    Source(
        "gimp-help-en",
        "GFDL-1.2-or-later without invariant sections",
        "html",
        r"/en/.*\.html$",
        r"(bibliography|gfdl|glossary-)",
    ),
    Source("kicad-doc-en", "GPL-3.0-or-later or CC-BY-3.0-or-later", "html", r"\.html$"),
    Source("zsh-doc", "MIT-like (Zsh licence)", "html", r"\.html$"),
    Source(
        "racket-doc",
        "MIT or Apache-2.0",
        "html",
        r"/racket/(guide|reference|quick|more|web-server|scribble|pict|draw|gui|continue|htdp|teachpack"
        r"|net|db|plot|slideshow|ts-guide|ts-reference|foreign|inside|math|syntax|xrepl|readline|raco|style"
        r"|how-to)[^/]*/.*\.html$"
        r"|/racket/[^/]*\.html$",
        NO_PROSE + "|doc-index",
    ),
    Source("ghc-doc", "BSD-3-Clause", "html", r"/users_guide/.*\.html$", NO_PROSE + "|-notes"),
    Source("ant-doc", "Apache-2.0", "html", r"/manual/.*\.html$", "api/"),
    Source("tomcat10-docs", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/api/"),
    Source(
        "python-sklearn-doc",
        "BSD-3-Clause",
        "html",
        r"\.html$",
        NO_PROSE + r"|/whats_new/|auto_examples/.*(index|sg_execution)",
        8.0,
    ),
    Source("python-scipy-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|/release", 8.0),
    Source("python-statsmodels-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|/generated/|/release/", 6.0),
    Source("grass-doc", "GPL-2.0-or-later", "html", r"\.html$", r"_index|keywords|topics|full_index"),
    Source("postgis-doc", "CC-BY-SA-3.0", "html", r"\.html$", "release"),
    Source("swi-prolog-doc", "BSD-2-Clause", "html", r"\.html$", "man_index"),
    Source("ironic-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/api/"),
    Source("heat-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/api/"),
    Source("glance-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/api/"),
    Source("octavia-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/api/"),
    Source("sphinx-doc", "BSD-2-Clause", "html", r"\.html$", NO_PROSE + "|changes"),
    Source("ganeti-doc", "BSD-2-Clause", "html", r"\.html$", NO_PROSE + "|news"),
    Source("varnish-doc", "BSD-2-Clause", "html", r"\.html$", NO_PROSE + "|whats-new"),
    Source("knot-doc", "GPL-3.0-or-later", "html", r"\.html$", NO_PROSE),
    Source("slurm-wlm-doc", "GPL-2.0-or-later", "html", r"\.html$", "news|team|publications"),
    Source("mercurial-common", "GPL-2.0-or-later", "man", r"/man/man\d/.*\.gz$"),
    Source("python-tornado-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE),
    Source("python-werkzeug-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|changes"),
    Source("python-jinja2-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|changes"),
    Source("python-attr-doc", "MIT", "html", r"\.html$", NO_PROSE),
    Source("python-psycopg2-doc", "LGPL-3.0-or-later", "html", r"\.html$", NO_PROSE + "|news"),
    Source("python-pytest-doc", "MIT", "html", r"\.html$", NO_PROSE + "|announce"),
    Source("docutils-doc", "public domain and BSD-2-Clause", "html", r"\.html$", NO_PROSE + "|HISTORY|RELEASE"),
    Source("python-gevent-doc", "MIT", "html", r"\.html$", NO_PROSE + "|changelog"),
    Source("pypy3-doc", "MIT", "html", r"\.html$", NO_PROSE + "|whatsnew|release-"),
    Source("cython-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|changes"),
    Source("python-dask-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|/generated/"),
    Source("python-xarray-doc", "Apache-2.0", "html", r"\.html$", NO_PROSE + "|/generated/|whats-new"),
    Source("python-ipython-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE + "|whatsnew"),
    Source(
        "openjdk-17-doc",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        "html",
        r"/api/java\.(base|logging|net\.http|sql)/.*\.html$",
        r"class-use|package-(tree|use)|index",
        5.0,
    ),
    Source(
        "gradle-doc", "Apache-2.0", "html", r"/userguide/.*\.html$|/dsl/.*\.html$", "javadoc|groovydoc|userguide_single"
    ),
    Source("frr-doc", "GPL-2.0-or-later", "html", r"\.html$", NO_PROSE),
    Source("bird-doc", "GPL-2.0-or-later", "html", r"\.html$"),
    Source("python-setuptools-doc", "MIT", "html", r"\.html$", NO_PROSE + "|history"),
    Source("python-tables-doc", "BSD-3-Clause", "html", r"\.html$", NO_PROSE),
    Source("vim-doc", "Vim (GPL compatible)", "html", r"\.html$", r"(tags|version\d|todo|quotes|index)\.html"),
    Source("netcdf-doc", "MIT-like (NetCDF licence)", "html", r"\.html$", r"_8[ch]|structs|globals|RELEASE"),
    Source("dict-gcide", "GPL-3.0-or-later (text of 1913: public domain)", "gcide", r"\.dict\.dz$", cap_mb=4.0),
)
